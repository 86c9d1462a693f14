// Collectives of device tensors that run late, on a thread of their own: as on the stream of a communicator.
//
// A collective reads its input when it runs, and not when it is launched. Until then its output is filled with 0xff. So
// an output that is read without waiting, or an input that is overwritten too early, shows as wrong numbers.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

namespace simulated_device {

/// With true, collectives that have not begun do not begin until this is called with false.
void hold_collectives(bool held);

/// Stages device memory through the hosts' own backend.
class LateCollectives final : public c10d::Backend {
 public:
  explicit LateCollectives(c10::intrusive_ptr<c10d::Backend> hosts);
  ~LateCollectives() override;

  const std::string getBackendName() const override { return "late"; }
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                                               const c10d::AllToAllOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override;

 private:
  struct Task;
  /// run(host copy of input, host copy of output), later. The tensors live until then.
  c10::intrusive_ptr<c10d::Work> launch(const at::Tensor& input, const at::Tensor& output,
                                        std::function<void(at::Tensor&, at::Tensor&)> run);
  void run_tasks();

  c10::intrusive_ptr<c10d::Backend> hosts_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<c10::intrusive_ptr<Task>> tasks_;
  bool ended_ = false;
  std::thread thread_;
};

}  // namespace simulated_device
