// solver="balanced": near-optimal plans for flat and nested bags.
//
// For each replica, by itself:
//   1. lower bound              lower_bound.h
//   2. constructive placements  balanced_fit.h, under a few target times; in flat bags the greedy ones
//   3. improvement              balanced_search.h, from the best of them
// Then, for all: groups trade places so that more tokens stay at home (home_assignment.h), and the chunks of shared
// sequences are cut unevenly where that helps (chunk_cut.h).
//
// Nested bags are balanced for predicted time. In a flat topology every sequence of a bag is shared by all its ranks
// whatever is planned, and the published measure is work per rank: there work is evened out without taking longer than
// greedy, then time; where bags differ in size, time first.
//
// By construction, replica by replica: a plan of flat bags is never worse than the greedy plan, neither by work nor by
// predicted time; and one of nested bags is never worse, in predicted time, than the plan of any flat topology that
// cuts each shape of its bags into groups of one of their degrees, as planned by this solver with the same effort, or
// by greedy. (Of more than 64 such topologies, those with groups of about one size.) A flat topology that is proven
// (lower_bound.h) not to be faster is not planned.
#pragma once

#include <span>
#include <vector>

#include "knapformer/core/bag_forest.h"
#include "knapformer/core/plan.h"

namespace knapformer {

class BalancedSolver {
 public:
  /// `effort` as in Effort::moves.
  BalancedSolver(PlanInput input, int64_t effort);

  Plan solve();

 private:
  /// Leaves sequences whole, placed by the greedy solver, in replicas where that is good enough.
  void place_greedily();
  void solve(int32_t replica, Objective objective);
  /// The nodes of the items, which are left in the forest.
  std::vector<int32_t> placed_nested(BagForest& forest, int32_t replica) const;
  std::vector<int32_t> placed_flat(BagForest& forest, int32_t replica) const;
  struct SearchRange {
    double least = 0;        // what no placement is below
    double time = 0;         // of the placement that is there
    double good_enough = 0;  // stop there
    /// High effort starts where default effort ended, or stands beside it: what came out better where tried.
    bool high_goes_on = false;
    double first_temperature = 1;
    double last_temperature = 0;
  };
  /// Improves the placement; at high effort never less than at default effort.
  void search(BagForest& forest, std::vector<int32_t>& node_of_item, int32_t replica, const SearchRange& range) const;
  /// Another round follows where one gained so much that its energy was out of scale for where it ended.
  void improve_in_rounds(BagForest& forest, std::vector<int32_t>& node_of_item, int32_t replica,
                         const SearchRange& range, int64_t effort) const;
  Plan finish(std::vector<Placement> placements) const;
  /// `replicas`: marks those to improve; the others stay greedy.
  Plan solve_all_flat(std::span<const char> replicas);
  /// The plan, with those replicas from plans of flat topologies that are better there.
  Plan with_flat_replicas(Plan plan) const;
  /// The plan of a flat topology, as one of this input's nested bags.
  Plan in_nested_bags(const Plan& flat) const;

  PlanInput input_;
  int64_t effort_;
  std::vector<Placement> placements_;
  std::vector<double> bounds_s_;  // of nested bags, by replica
  std::vector<char> is_greedy_;   // by replica: placed by place_greedily
};

}  // namespace knapformer
