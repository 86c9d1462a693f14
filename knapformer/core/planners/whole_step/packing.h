// Packing: the micro-batch and the ranks of each sequence of a step, over all micro-batches at once.
//
// A micro-batch takes as long as its slowest rank, and the step takes the sum of its micro-batches. So every
// micro-batch has a level, the time up to which its ranks are filled; levels may differ, and their sum counts. If the
// levels add up to the lower bound and every rank is full, no time is lost. The bags of all micro-batches are trees
// (balanced/placement_tree.h), and sequences are placed by descending work where most time is left below the level.
#pragma once

#include <span>
#include <vector>

#include "knapformer/core/plan/step_plan.h"
#include "knapformer/core/planners/balanced/effort.h"
#include "knapformer/core/planners/balanced/placement_tree.h"

namespace knapformer {

struct Packing {
  std::vector<int32_t> micro_batches = {};  // by sequence id
  std::vector<Placement> placements = {};   // by sequence id
  std::vector<double> times_s = {};         // by micro-batch, of one block in its slowest group
  bool keeps_limit = true;                  // of tokens
};

/// The times up to which the ranks of each micro-batch are filled.
struct Levels {
  std::vector<double> levels_s = {};  // by micro-batch, of one block; 0 where it stays empty
  /// A sequence goes to the smallest group that then exceeds its level by at most this. If it is infinite, a sequence
  /// is shared only if it alone takes longer than the highest level, or to keep the limit of tokens.
  double margin_s = 0;
  double time_s = 0;  // of a step that was packed under them
};

class Packer {
 public:
  /// For `num_micro_batches` of the input's sequences. `stride`: of so many bags and sequences, or replicas, one is
  /// packed, to see how long all take.
  Packer(const PlanInput& input, int32_t num_micro_batches, int32_t stride = 1);

  Packing pack(const Levels& levels);
  /// Anneals the last packing, so that its micro-batches exceed their levels less.
  Packing anneal(std::vector<double> levels_s, Effort effort);

  std::span<const PlacementTrees> trees() const { return trees_; }

 private:
  Packing packing() const;

  const PlanInput& input_;
  int32_t num_micro_batches_, stride_;
  std::vector<PlacementTrees> trees_;        // by replica
  std::vector<std::vector<int32_t>> nodes_;  // of their items
};

/// By tokens alone, for limits that no packing by time keeps: each sequence goes to the smallest group with room, or
/// over a whole bag.
Packing pack_by_tokens(const PlanInput& input, int32_t num_micro_batches, bool in_whole_bags);

}  // namespace knapformer
