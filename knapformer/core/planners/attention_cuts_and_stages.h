// How the ranks of a group cut attention, for each degree of a topology: into parts of the heads and of the queries,
// and in how many stages keys travel.
#pragma once

#include "knapformer/core/plan/micro_batch_plan.h"

namespace knapformer {

/// Sets input.attention_cuts, where the model's kernel takes parts of queries and its number of heads is known. Of all
/// cuts with which every rank has work, and at most a third more than another, it takes for each degree the one with
/// the least time for the sequences that need this degree: those with more work than the next lower degree takes in an
/// even step, up to what this degree takes. Heads that divide are not cut any further. With max_stage_bytes it takes
/// the fastest of the cuts that exceed it least. Planners call it once a step, so that micro-batches are cut alike.
void cut_attention(PlanInput& input, int32_t num_micro_batches = 1);

}  // namespace knapformer
