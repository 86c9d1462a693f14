// Ranks as threads of one process, over a c10d backend that copies between their tensors: balancers under test meet
// real process groups, and a case of eight ranks takes milliseconds.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace knapformer::testing {

/// Counted per rank, over all groups.
struct CollectiveCounts {
  std::atomic<int64_t> all_to_all = 0;
  std::atomic<int64_t> all_gather = 0;
  std::atomic<int64_t> bytes_sent = 0;  // by all-to-alls
  std::atomic<int64_t> bytes_sent_to_self = 0;
};

class MeetingPoint;

/// A few ranks, and the groups that they make among each other.
class InProcessWorld {
 public:
  explicit InProcessWorld(int32_t num_ranks, std::chrono::milliseconds timeout = std::chrono::seconds(20));
  ~InProcessWorld();

  int32_t num_ranks() const { return num_ranks_; }
  /// The group of these ranks as `rank`, one of them, holds it. The same ranks get the same group.
  c10::intrusive_ptr<c10d::ProcessGroup> group(const std::vector<int64_t>& ranks, int64_t rank);
  c10::intrusive_ptr<c10d::ProcessGroup> all(int64_t rank);
  /// Makes groups for a balancer of this rank.
  auto groups_of(int64_t rank) {
    return [this, rank](const std::vector<int64_t>& ranks) { return group(ranks, rank); };
  }
  CollectiveCounts& counts(int64_t rank) { return *counts_[static_cast<size_t>(rank)]; }

  /// Runs `body(rank)` on a thread for each rank. What each threw, in rank order; null where it did not.
  std::vector<std::exception_ptr> run(const std::function<void(int32_t rank)>& body);
  /// The same; fails the running test with what ranks threw.
  void run_all(const std::function<void(int32_t rank)>& body);

 private:
  int32_t num_ranks_;
  std::chrono::milliseconds timeout_;
  std::vector<std::unique_ptr<CollectiveCounts>> counts_;
  std::mutex mutex_;
  std::map<std::vector<int64_t>, std::shared_ptr<MeetingPoint>> boards_;
  std::map<std::pair<std::vector<int64_t>, int64_t>, c10::intrusive_ptr<c10d::ProcessGroup>> groups_;
};

/// The message of an exception, with its type in front: "ArgumentError: x: got ..."; "" for none.
std::string describe(const std::exception_ptr& error);

}  // namespace knapformer::testing
