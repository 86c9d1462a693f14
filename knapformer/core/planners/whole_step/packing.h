// Packing: the micro-batch and the ranks of each sequence of a step, over all micro-batches at once.
//
// A micro-batch takes as long as its slowest rank, and the step takes the sum of its micro-batches. So every
// micro-batch has a level, the time up to which its ranks are filled; levels may differ, and their sum counts. If the
// levels add up to the lower bound and every rank is full, no time is lost. The bags of all micro-batches are trees
// (balanced/placement_tree.h), and sequences are placed by descending work where most time is left below the level.
//
//   level 1 |#####################|     a first level, tried at several heights: sequences that are longer than the
//   level 2 |############|              others' levels need room in it, whole or shared beside whole ones;
//   level 3 |########|                  then steps: each is the longest sequence that is left;
//   level 4 |########|                  what remains of the time is divided evenly over the rest
//
// All add up to the lower bound of the step, and none is below what FSDP gathers meanwhile. The best packing is
// annealed (balanced/anneal.h), except at low effort.
#pragma once

#include <optional>
#include <vector>

#include "knapformer/core/plan/plan.h"
#include "knapformer/core/planners/balanced/effort.h"

namespace knapformer {

struct Packing {
  std::vector<int32_t> micro_batches = {};  // by sequence id
  std::vector<Placement> placements = {};   // by sequence id
  std::vector<double> times_s = {};         // by micro-batch, of one block in its slowest group
  std::vector<double> levels_s = {};        // by micro-batch, up to which its ranks were to be filled
  bool keeps_limit = true;                  // of tokens
};

/// The best packing by time in `num_micro_batches` of the input's, of those that keep the limit of tokens.
std::optional<Packing> pack_by_time(const StepInput& input, int32_t num_micro_batches, Effort effort);

/// By tokens alone, for limits that no packing by time keeps: each sequence goes to the smallest group with room, or
/// over a whole bag.
Packing pack_by_tokens(const PlanInput& input, int32_t num_micro_batches, bool in_whole_bags);

/// The given order, each sequence in the smallest group around its home rank: it keeps any limit that ranks keep which
/// compute what they are given.
Packing pack_at_home(const StepInput& input);

/// Each sequence of a replica in its own micro-batch, over a largest bag: what keeps a limit if anything does. Nothing
/// where there are fewer micro-batches.
std::optional<Packing> pack_one_by_one(const StepInput& input);

}  // namespace knapformer
