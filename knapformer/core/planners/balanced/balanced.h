// The balanced planner: near-optimal plans for flat and nested bags.
//
// For each replica, by itself:
//   1. lower bound        cost/bounds.h
//   2. choose groups      longest first in flat bags of each degree, or the best placement of few sequences
//                         (branch_and_bound.h); choose_groups.h, under a few target times
//   3. anneal             anneal.h, from the best of them; once more where they exceed the limit of tokens
// Then, for all: equal sequences trade places so that more tokens stay at home (locality.h), and shared sequences are
// cut into uneven chunks.
//
// By construction a block never takes longer in flat bags than by the greedy plan; in nested ones, with ranks of one
// speed and groups inside nodes, than longest first in flat bags of any of their degrees.
#pragma once

#include "knapformer/core/plan/micro_batch_plan.h"
#include "knapformer/core/planners/balanced/effort.h"

namespace knapformer {

/// Of valid input.
MicroBatchPlan plan_balanced(PlanInput input, Effort effort);

}  // namespace knapformer
