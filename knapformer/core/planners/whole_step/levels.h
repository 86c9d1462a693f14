// The levels of a step's micro-batches, and the packing under the best of them.
//
// A micro-batch takes as long as its slowest rank, and the step takes the sum of its micro-batches. So every
// micro-batch has a level, the time up to which its ranks are filled; levels may differ, and their sum counts. If the
// levels add up to the lower bound and every rank is full, no time is lost.
//
//   level 1 |#####################|     a first level, tried at several heights: sequences that are longer than the
//   level 2 |############|              others' levels need room in it, whole or shared beside whole ones;
//   level 3 |########|                  then steps: each is the longest sequence that is left;
//   level 4 |########|                  what remains of the time is divided evenly over the rest
//
// None is below what FSDP gathers meanwhile. The best packing is annealed, except at low effort.
#pragma once

#include "knapformer/core/planners/whole_step/packing.h"

namespace knapformer {

/// The best packing by time in `num_micro_batches` of the input's, of those that keep the limit of tokens.
std::optional<Packing> pack_by_time(const StepInput& input, int32_t num_micro_batches, Effort effort);

}  // namespace knapformer
