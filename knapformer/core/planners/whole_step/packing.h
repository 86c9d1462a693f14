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

namespace knapformer {

struct Packing {
  std::vector<int32_t> micro_batches = {};  // by sequence id
  std::vector<Placement> placements = {};   // by sequence id
  std::vector<double> levels_s = {};        // by micro-batch, of one block; 0 where it stays empty
  std::vector<double> times_s = {};         // by micro-batch, of its slowest group
  bool keeps_limit = true;                  // of tokens
};

/// Levels that add up to `sum_s`, for `count` micro-batches of the input's sequences:
///
///   level 1 |#####################|     the longest sequences set the first levels: each is the longest that is left;
///   level 2 |###########|               what remains of the time is divided evenly over the rest, so that no
///   level 3 |###########|               micro-batch holds more tokens than it must
///
/// `max_steps`: so many levels at most are set by the longest sequences; with 0 all are even.
std::vector<double> stepped_levels_s(const PlanInput& input, double sum_s, int32_t count, int32_t max_steps);

/// What a packing by time shares.
enum class Sharing {
  kLeast,  // a sequence that alone takes longer than the highest level, or does not keep the limit of tokens
  kMore,   // any that fits no group of fewer ranks below the highest level any more
  kBags,   // everything, over whole bags
};

/// Each sequence goes to the smallest group that it then fits. `effort`: of the annealing that follows.
Packing pack_by_time(const PlanInput& input, std::span<const double> levels_s, Sharing sharing,
                     Effort effort = {.moves = Effort::kLow});
/// By tokens alone, for limits that no packing by time keeps: each sequence goes to the smallest group with room, or
/// over a whole bag.
Packing pack_by_tokens(const PlanInput& input, int32_t num_micro_batches, bool in_whole_bags);

}  // namespace knapformer
