#include "knapformer/core/planners/balanced/balanced.h"

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "knapformer/core/cost/bounds.h"
#include "knapformer/core/cost/step_time.h"
#include "knapformer/core/planners/balanced/anneal.h"
#include "knapformer/core/planners/balanced/branch_and_bound.h"
#include "knapformer/core/planners/balanced/choose_groups.h"
#include "knapformer/core/planners/balanced/locality.h"
#include "knapformer/core/planners/balanced/uneven_chunks.h"
#include "knapformer/core/planners/greedy/greedy.h"
#include "knapformer/core/util/error.h"
#include "knapformer/core/util/winner_tree.h"

namespace knapformer {
namespace {

/// Of each bag its largest groups of at most `degree` ranks, or else its smallest.
std::vector<int32_t> groups_of(const PlacementTrees& trees, int32_t degree) {
  std::vector<int32_t> groups;
  for (int32_t bag = 0; bag < trees.num_bags(); ++bag) {
    std::pair<int32_t, int32_t> range;
    for (const int32_t of_groups : trees.degrees()) {
      const auto nodes = trees.nodes_of(bag, of_groups);
      if (nodes.first < nodes.second && (of_groups <= degree || range.first == range.second)) range = nodes;
    }
    for (int32_t v = range.first; v < range.second; ++v) groups.push_back(v);
  }
  return groups;
}

/// Each item in the group with the least work so far, the longest first.
std::vector<int32_t> longest_first(const PlacementTrees& trees, std::span<const int32_t> groups) {
  WinnerTree work(groups.size());
  std::vector<int32_t> node_of_item;
  for (const TreeItem& item : trees.items()) {
    node_of_item.push_back(groups[work.winner()]);
    const PlacementTrees::Node& n = trees.node(node_of_item.back());
    work.set_min(work.min() + item.tokens * n.time_per_token + item.attention * n.attention_share);
  }
  return node_of_item;
}

class ReplicaSolver {
 public:
  ReplicaSolver(const PlanInput& input, int32_t replica, Effort effort)
      : input_(input), replica_(replica), effort_(effort), trees_(input, replica) {
    bound_ = std::max(1.0, replica_lower_bound_s(input, input.topology, replica) / trees_.unit_s());
  }

  /// Places the replica's sequences. has_start: `placements` has a placement of them, than which this is no slower.
  /// Returns whether the limit of tokens is kept.
  bool place(std::vector<Placement>& placements, bool has_start) {
    if (trees_.items().empty()) return true;
    std::vector<int32_t> start;
    if (has_start) {
      for (const TreeItem& item : trees_.items()) start.push_back(trees_.node_of(placements[item.id.index()]));
    }
    std::vector<int32_t> nodes = best_from(start);
    if (!trees_.keeps_limit()) {
      trees_.enforce_limit();
      nodes = best_from(start);
    }
    for (size_t i = 0; i < nodes.size(); ++i) placements[trees_.items()[i].id.index()] = trees_.placement(nodes[i]);
    return trees_.keeps_limit();
  }

 private:
  /// The nodes of the items, which are left in the trees: the best of some constructions, improved.
  std::vector<int32_t> best_from(const std::vector<int32_t>& start) {
    std::vector<int32_t> best;
    double best_time = kInfinity;
    const auto consider = [&](std::vector<int32_t> nodes) {
      trees_.put(nodes);
      if (trees_.slowest() >= best_time) return;
      best_time = trees_.slowest();
      best = std::move(nodes);
    };
    const auto is_good = [&] { return best_time <= bound_ * Effort::kGoodStart; };
    SearchOptions options{.num_moves = effort_.num_moves(std::ssize(trees_.items()), trees_.misses_enforced_limit()),
                          .key = random_key(input_, replica_),
                          .bound = bound_,
                          .good_enough = bound_ * Effort::kGoodEnough};
    // Nested bags try each degree: too long for a step of thousands of replicas, planned at low effort.
    const bool is_flat = input_.topology.is_flat(), tries_few = is_flat || effort_.moves != Effort::kLow;
    if (!start.empty()) consider(start);
    for (const int32_t degree : trees_.degrees()) {
      if (is_good()) break;
      const std::vector<int32_t> groups = groups_of(trees_, degree);
      std::vector<int32_t> nodes = longest_first(trees_, groups);
      const bool is_best = tries_few && place_few(trees_, groups, nodes, options.good_enough, options.num_moves);
      consider(std::move(nodes));
      if (is_flat && is_best) return best;
      if (is_flat) break;  // a bag is one group, whatever the degree
    }
    GroupChooser chooser(trees_);
    // Times the bound. With kNear = 1 steps miss goals by 0.1 %, with 1.005 planning 256 ranks takes 1.5 times as long.
    // Without kFar plans on slow links take 35 % longer; half or double its margin: as long.
    constexpr double kNear = 1.01, kFar = 1.05;
    // Half: up to 44 % slower on slow links at low effort, 2 % at default; double: 0.3 % either way.
    const int32_t num_targets = effort_.moves == Effort::kLow ? 3 : 4;
    if (!is_good()) consider(chooser.place_under_targets(GroupChooser::Sharing::kToFit, bound_, num_targets));
    if (best_time > kFar * bound_)
      consider(chooser.place_under_targets(GroupChooser::Sharing::kLeast, bound_, num_targets));
    options.shares_least_first = best_time <= kNear * bound_;
    improve(trees_, best, options);
    if (trees_.enforces_limit() && trees_.slowest() > options.good_enough) {
      // Tokens are most even where every sequence is shared by as many ranks as possible; it takes a hot start from
      // there. Half or twice as hot makes plans of a limit 0.2 % faster; as hot as others, it keeps fewer limits.
      best_time = trees_.slowest();
      std::vector<int32_t> spread;
      chooser.place_all(0, GroupChooser::Sharing::kMost, spread);
      SearchOptions hot = options;
      hot.shares_least_first = true;  // and a second round that is not hot
      hot.first_temperature = 32;
      improve(trees_, spread, hot);
      if (trees_.slowest() < best_time) return spread;
      trees_.put(best);
    }
    return best;
  }

  const PlanInput& input_;
  int32_t replica_;
  Effort effort_;
  PlacementTrees trees_;
  double bound_ = 1;  // of the time, in the trees' unit
};

/// The better of two plans of an input: the one that keeps the limit of tokens, or is faster.
MicroBatchPlan better_of(MicroBatchPlan a, MicroBatchPlan b) {
  const auto judged = [](const MicroBatchPlan& plan) {
    const MicroBatchTime time = predict_micro_batch(plan);
    const double block_s = std::ranges::max(time.replica_block_s);
    return std::pair(!plan.keeps_limit(), plan.topology().is_flat() ? block_s : time.total_s());
  };
  return judged(b) < judged(a) ? b : a;
}

}  // namespace

MicroBatchPlan plan_balanced(PlanInput input, Effort effort) {
  // The search does not see tokens that do not divide. In flat bags chunks are even, unless speeds differ.
  const bool is_even = input.topology.is_flat() && input.rank_speed.empty();
  const auto finish = [&](std::vector<Placement> placements) {
    bring_home(input, placements);
    if (is_even) return MicroBatchPlan(input, "balanced", std::move(placements));
    std::vector<int64_t> chunk_lens = uneven_chunk_lens(input, placements);
    return MicroBatchPlan(input, "balanced", std::move(placements), std::move(chunk_lens));
  };
  // A search over groups of several nodes finds worse plans, in more time, than one over groups inside nodes: so it is
  // made where those cannot take the sequences, and starts from their plan.
  PlanInput inside = input;
  inside.topology = input.topology.within(input.cluster.ranks_per_node);
  std::vector<Placement> placements(static_cast<size_t>(input.seq_lens.num_sequences()));
  std::vector<int32_t> wide;  // replicas
  for (int32_t replica = 0; replica < input.topology.num_replicas(); ++replica) {
    const bool keeps_limit = ReplicaSolver(inside, replica, effort).place(placements, /*has_start=*/false);
    if (inside.topology == input.topology) continue;
    const double inside_s = replica_lower_bound_s(input, inside.topology, replica);
    if (!keeps_limit || inside_s > replica_lower_bound_s(input, input.topology, replica)) wide.push_back(replica);
  }
  for (Placement& place : placements) place.bag = input.topology.bag_of(place.first_rank);
  MicroBatchPlan plan = finish(placements);
  for (const int32_t replica : wide) ReplicaSolver(input, replica, effort).place(placements, /*has_start=*/true);
  if (!wide.empty()) plan = better_of(std::move(plan), finish(std::move(placements)));
  if (!input.topology.is_flat()) return plan;
  return better_of(std::move(plan), MicroBatchPlan(input, "balanced", greedy_placements(input)));
}

}  // namespace knapformer
