// The balanced planner: near-optimal plans for flat and nested bags.
//
// For each replica, by itself:
//   1. lower bound        cost/bounds.h
//   2. construct          construct.h, under a few target times; in flat bags greedy/greedy.h
//   3. anneal             anneal.h, from the best of them
// Then, for all: equal sequences trade places so that more tokens stay at home (locality.h), and shared sequences are
// cut into uneven chunks (uneven_chunks.h).
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

#include "knapformer/core/plan/plan.h"
#include "knapformer/core/planners/balanced/effort.h"

namespace knapformer {

/// Of valid input.
Plan plan_balanced(PlanInput input, Effort effort);

}  // namespace knapformer
