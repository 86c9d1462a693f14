// A channel: one group of ranks as one balancer uses it, and all that the exchanges over it share.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <stop_token>
#include <string>

#include "knapformer/torch/agreement.h"
#include "knapformer/torch/collectives.h"
#include "knapformer/torch/lookout.h"

namespace knapformer {

/// What a channel has moved and waited for, since it was made. Backward passes count from autograd's threads.
struct ChannelCounters {
  std::atomic<int64_t> bytes_sent = 0;
  std::atomic<int64_t> num_collectives = 0;
  std::atomic<int64_t> waited_ns = 0;  // of the host, on threads that had to
};

class Channel {
 public:
  /// Known to the op by a name that no other channel of this process has; `name` is the beginning of it.
  /// `store_prefix`: of keys that no other channel on this group uses, the same on all ranks. first_rank: the number of
  /// the group's first rank, for messages; the others follow it. Thread-safe.
  static std::shared_ptr<Channel> make(std::string_view name, ProcessGroupPtr group, const std::string& store_prefix,
                                       std::shared_ptr<Lookout> lookout, int32_t first_rank = 0);
  /// Throws StateError where there is none of that name (any more).
  static std::shared_ptr<Channel> find(std::string_view name);

  /// Lets the groups of all channels go, and waits for threads of those that nobody else holds: what the process does
  /// before it ends. No channel can start a collective after it.
  static void release_groups();
  /// What a channel does with its group at its end, instead of just dropping it: the end of a group joins threads that
  /// may need a lock which this thread holds.
  static void set_drop_group(void (*drop)(ProcessGroupPtr group));

  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  const std::string& name() const { return name_; }
  /// Throws StateError after release_groups. Thread-safe.
  ProcessGroupPtr group() const;
  int32_t rank() const { return rank_; }
  int32_t num_ranks() const { return num_ranks_; }
  Agreement& agreement() { return *agreement_; }
  ChannelCounters& counters() { return counters_; }
  const ChannelCounters& counters() const { return counters_; }
  ErrorBoard& board() { return *lookout_->board(); }
  /// The plan of the exchange that ran last in a backward pass (EndView::plan); 0: none since it was set so.
  std::atomic<int64_t>& plan_in_backward() { return plan_in_backward_; }
  /// Where ranks tell each other about the work: the CPU, where the group has a backend for it.
  at::Device control_device() const;

  /// Blocks until the work is done, and throws where another rank raised meanwhile. For tensors of an accelerator its
  /// stream waits, not the host: unless `on_host`, which waits for both. Throws soon after `stop` asks for it.
  void wait(c10d::Work& work, at::Device device, std::string_view label, bool on_host = false,
            const std::stop_token& stop = {});

 private:
  Channel(std::string name, ProcessGroupPtr group, const std::string& store_prefix, std::shared_ptr<Lookout> lookout,
          int32_t first_rank);

  std::string name_;
  mutable std::mutex group_mutex_;
  ProcessGroupPtr group_;
  int32_t rank_, num_ranks_;
  std::shared_ptr<Lookout> lookout_;
  std::shared_ptr<Agreement> agreement_;
  ChannelCounters counters_;
  std::atomic<int64_t> plan_in_backward_ = 0;
};

/// How long collectives of this group may take.
std::chrono::milliseconds timeout_of(c10d::ProcessGroup& group);

}  // namespace knapformer
