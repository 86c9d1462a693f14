// Levels of the micro-batches of a step, by packing a sample of it under many of them.
//
//   level 1 |#####################|     a first level, tried at several heights: sequences that are longer than the
//   level 2 |############|              others' levels need room in it, whole or shared beside whole ones;
//   level 3 |########|                  then steps: each is the longest sequence that is left;
//   level 4 |########|                  what remains of the time is divided evenly over the rest
//
// All add up to the lower bound of the step, and none is below what FSDP gathers meanwhile. The best of them are then
// shifted a little.
#pragma once

#include <vector>

#include "knapformer/core/planners/whole_step/packing.h"

namespace knapformer {

/// Of each micro-batch's bags and sequences, one of so many shows which levels are good.
int32_t sample_stride(const StepInput& input, int32_t num_micro_batches);

/// The best first, without those whose sample exceeds the limit of tokens. For `num_micro_batches` of the input's.
std::vector<Levels> ranked_levels(const StepInput& input, int32_t num_micro_batches, Effort effort);

/// How long a step of these block times takes, for comparisons. Where FSDP hides all of a block, shorter blocks are
/// better still: so a hundredth of the blocks' time is added. A micro-batch that takes twice the mean holds twice the
/// tokens: so the step must be 0.1 % shorter.
double levels_time_s(const StepInput& input, std::vector<double> block_s);
/// The same; infinite if the packing exceeds the limit of tokens.
double packed_s(const StepInput& input, const Packing& packing);

}  // namespace knapformer
