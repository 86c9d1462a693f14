// The ranks of a balancer: their groups, and the guard by which an error on one rank becomes an error on all.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "knapformer/core/model/topology.h"
#include "knapformer/core/util/ids.h"
#include "knapformer/torch/comm/comm_group.h"
#include "knapformer/torch/planning.h"

namespace knapformer {

/// Makes the group of a bag from its ranks, counted inside the balancer's group, in order. Called once, by the bag's
/// ranks alone, and not for bags of one.
using MakeBagGroup = std::function<ProcessGroupPtr(const std::vector<int64_t>& ranks)>;
/// Makes a group of all ranks for tensors on the CPU. Called once, by all ranks, where the balancer's group has no
/// backend for them.
using MakeCpuGroup = std::function<ProcessGroupPtr()>;

class Ranks {
 public:
  /// As SequenceBalancer's.
  Ranks(std::string_view topology, BalancerOptions options, ProcessGroupPtr group, const MakeBagGroup& make_bag_group,
        const MakeCpuGroup& make_cpu_group);
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  /// Runs the body of a collective method. Throws after an earlier error; tells other ranks of an error in the body.
  template <class Body>
  decltype(auto) collective(Body body) {
    if (!peer_errors_) return body();
    peer_errors_->check_usable();
    return peer_errors_->guard(body);
  }
  /// Tells the other ranks of an error outside of `collective`.
  void report(const std::exception& error) noexcept;

  /// Numbers for steps that are planned now: the first of `count`. All ranks plan in the same order.
  int64_t take_numbers(int64_t count) { return std::exchange(next_number_, next_number_ + count); }
  /// Agrees with the other ranks on a call; waits for them where it is not as predicted (fingerprint.h).
  void agree(const Fingerprint& call);
  /// The same of a call after which exchanges go by another step, which is the call's.
  void enter_step(const Fingerprint& call);

  const BalancerOptions& options() const { return options_; }
  Rank rank() const { return rank_; }
  /// The number of this balancer on its group, the same on all ranks: each counts those made, and making is collective.
  int64_t balancer() const { return balancer_; }
  int32_t num_ranks() const { return topology().num_ranks(); }
  const Topology& topology() const { return options_.plan.topology; }

  /// Null for one rank alone, as the next.
  const std::shared_ptr<CommGroup>& all() const { return all_; }
  const std::shared_ptr<PeerErrors>& peer_errors() const { return peer_errors_; }
  /// Null in a bag of one.
  const std::shared_ptr<CommGroup>& bag() const { return bag_; }

  /// Devices of the tensors so far.
  std::span<const TablesDevice> devices() const { return devices_; }
  /// That of devices(), where it is from now on.
  TablesDevice& known_device(at::Device device);

  /// Since the ranks met.
  struct Traffic {
    int64_t bytes_sent = 0, num_collectives = 0;
    double waited_s = 0;
  };
  Traffic traffic() const;

 private:
  /// The group of this rank's bag; null in a bag of one.
  std::shared_ptr<CommGroup> join_bag(const ProcessGroupPtr& group, const std::string& store_prefix,
                                      const MakeBagGroup& make_bag_group) const;

  BalancerOptions options_;  // with the topology
  Rank rank_;
  int64_t balancer_ = 0;
  std::shared_ptr<PeerErrors> peer_errors_;
  std::shared_ptr<CommGroup> all_, bag_;
  std::vector<TablesDevice> devices_;
  int64_t next_number_ = 1;
};

}  // namespace knapformer
