// A comm group: one balancer's use of a process group, and the state that its exchanges share.
#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <stop_token>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "knapformer/torch/comm/fingerprint.h"
#include "knapformer/torch/comm/peer_errors.h"

namespace knapformer {

using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// What a comm group has moved and waited for since it was made. Atomic, as backward passes count from autograd's
/// threads.
struct CommCounters {
  std::atomic<int64_t> bytes_sent = 0;
  std::atomic<int64_t> num_collectives = 0;
  std::atomic<int64_t> waited_ns = 0;  // by the host; waits in the background do not count

  void add_wait_since(std::chrono::steady_clock::time_point begin) {
    waited_ns += std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - begin).count();
  }
};

class CommGroup {
 public:
  /// store_prefix: a prefix of store keys that no other comm group over this process group uses; the same on all ranks.
  /// first_rank: the number that messages give the group's first rank; the others follow it. Thread-safe. A forked
  /// process never deletes it, nor what it holds: the threads of the process group are not there.
  static std::shared_ptr<CommGroup> make(ProcessGroupPtr group, const std::string& store_prefix,
                                         std::shared_ptr<PeerErrors> peer_errors, int32_t first_rank = 0);

  /// For a process that is about to end: leaves all balancers, releases all process groups, and waits for the threads
  /// of those that nobody else holds. No collective can start afterwards. Leaves those of the process that this one
  /// was forked from.
  static void release_process_groups();
  /// Sets the function by which a comm group drops its process group at its end: the end of a process group joins
  /// threads that may need a lock which this thread holds.
  static void set_drop_process_group(void (*drop)(ProcessGroupPtr group));

  ~CommGroup();
  CommGroup(const CommGroup&) = delete;
  CommGroup& operator=(const CommGroup&) = delete;

  int32_t num_ranks() const { return fingerprints_->place().num_ranks; }
  CallFingerprints& fingerprints() { return *fingerprints_; }
  CommCounters& counters() { return counters_; }
  PeerErrors& peer_errors() { return *peer_errors_; }
  /// From now on, tensors on the CPU travel by `group`, which has the same ranks, as this group's own process group has
  /// no backend for them.
  void use_cpu_group(ProcessGroupPtr group);
  /// The device of the tensors that carry lengths, hashes of plans and samples: the CPU where there is a backend for
  /// it.
  at::Device control_device() const;

  /// Starts an all-to-all of one-dimensional tensors of bytes; splits by peer.
  WorkPtr start_all_to_all(at::Tensor& recv, at::Tensor& send, std::vector<int64_t> recv_splits,
                           std::vector<int64_t> send_splits, std::string_view label);
  /// Starts an all-gather of one-dimensional tensors of equal size.
  WorkPtr start_all_gather(at::Tensor& gathered, at::Tensor& own, std::string_view label);
  /// Blocks until the work is done, and throws where another rank raised meanwhile. For tensors of an accelerator the
  /// stream waits and not the host; with `on_host` both wait. With a `stop` that can be requested the wait is in the
  /// background, and throws soon after the request.
  void wait(c10d::Work& work, at::Device device, std::string_view label, bool on_host = false,
            const std::stop_token& stop = {});

 private:
  CommGroup(ProcessGroupPtr group, const std::string& store_prefix, std::shared_ptr<PeerErrors> peer_errors,
            int32_t first_rank);
  WorkPtr start(std::string_view label, size_t num_bytes, const std::function<WorkPtr()>& launch);
  /// Throws the cause of a failed collective: the error of another rank, or else a StateError that quotes `error`.
  [[noreturn]] void fail(std::string_view label, const std::exception& error);

  /// The process group by which tensors of a device travel. Throws StateError after release_process_groups.
  ProcessGroupPtr group_for(at::Device device) const;

  mutable std::mutex mutex_;
  const pid_t process_ = ::getpid();
  ProcessGroupPtr process_group_;
  ProcessGroupPtr cpu_group_;  // null: process_group_ serves the CPU, or nothing does
  std::shared_ptr<PeerErrors> peer_errors_;
  std::shared_ptr<CallFingerprints> fingerprints_;
  CommCounters counters_;
};

/// How long collectives of this group may take.
std::chrono::milliseconds timeout_of(c10d::ProcessGroup& group);

}  // namespace knapformer
