// The balanced planner: near-optimal plans for flat and nested bags.
//
// For each replica, by itself:
//   1. lower bound        cost/bounds.h
//   2. construct          construct.h, under a few target times; in flat bags greedy/greedy.h
//   3. anneal             anneal.h, from the best of them
// Then, for all: groups swap what they hold so that more tokens stay at home (locality.h), and shared sequences are cut
// into uneven chunks (uneven_chunks.h).
//
// Nested bags are balanced for the predicted step. In a flat topology every sequence of a bag is shared by all its
// ranks in any plan, and the published measure is work per rank: there work is evened out first, in no more time than
// greedy takes, then time; where bags differ in size, time first.
//
// By construction, replica by replica: a plan of flat bags is never worse than the greedy plan, neither by work nor by
// the time of a block. A plan of nested bags never takes a longer step than the plan of any flat topology that cuts
// each shape of its bags into groups of one of their degrees, made by this planner with the same effort or by greedy.
// (Where there are more than 64 such topologies, of those with groups of about one size.) A flat topology that is
// proven not to be faster is not planned.
#pragma once

#include <span>
#include <vector>

#include "knapformer/core/plan/plan.h"
#include "knapformer/core/planners/balanced/anneal.h"
#include "knapformer/core/planners/balanced/effort.h"
#include "knapformer/core/planners/balanced/placement_tree.h"

namespace knapformer {

class BalancedSolver {
 public:
  /// `effort` as in Effort::moves.
  BalancedSolver(PlanInput input, int64_t effort);

  Plan solve();

 private:
  /// Leaves sequences whole, as greedy places them, in replicas where that is good enough.
  void place_greedily();
  void solve(int32_t replica, Objective objective);
  /// The nodes of the items, which are left in the trees.
  std::vector<int32_t> placed_nested(PlacementTrees& trees, int32_t replica) const;
  std::vector<int32_t> placed_flat(PlacementTrees& trees, int32_t replica) const;
  struct SearchRange {
    double bound = 0;  // no placement takes less time
    double time = 0;   // of the placement to start from
    /// Whether high effort starts from the result of default effort, or from the same placement as that.
    bool high_goes_on = false;
    SearchOptions options;  // but for what each round sets
  };
  /// Improves the placement; at high effort by at least as much as at default effort.
  void search(PlacementTrees& trees, std::vector<int32_t>& node_of_item, int32_t replica,
              const SearchRange& range) const;
  /// Anneals, and again while a round gains much: its energy was scaled to the time at its start.
  void improve_in_rounds(PlacementTrees& trees, std::vector<int32_t>& node_of_item, int32_t replica,
                         const SearchRange& range, int64_t effort) const;
  Plan finish(std::vector<Placement> placements) const;
  /// What a plan of flat bags is to be better in: even work, without slower blocks (the published measure), or, as a
  /// candidate beside a nested plan, the whole step.
  enum class FlatGoal { kEven, kStep };
  /// `replicas`: marks those to improve; the others stay greedy.
  Plan solve_all_flat(std::span<const char> replicas, FlatGoal goal);
  /// The plan, with those replicas from plans of flat topologies that are better there.
  Plan with_flat_replicas(Plan plan) const;
  /// The plan of a flat topology, as one of this input's nested bags.
  Plan in_nested_bags(const Plan& flat) const;

  PlanInput input_;
  int64_t effort_;
  std::vector<Placement> placements_;
  std::vector<double> bounds_s_;  // of a block in nested bags, by replica
  std::vector<char> is_greedy_;   // by replica: placed by place_greedily
};

/// Of valid input.
inline Plan plan_balanced(PlanInput input, Effort effort) {
  return BalancedSolver(std::move(input), effort.moves).solve();
}

}  // namespace knapformer
