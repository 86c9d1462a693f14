// Lower bounds of the time of any plan of an input.
//
// Let a plan take block time T. A sequence that g ranks share fits into their time T only if its per-token work, its
// attention and its exchange fit: w(l) + x_g(l) <= T * (speed of the g ranks). So there is a smallest degree with which
// it can be shared at all. The exchange grows with the degree, so with this smallest degree the sequence costs its bag
// the least rank time. Summed over all sequences, this rank time is at most T * (speed of all ranks). The bound is the
// smallest T for which both conditions hold; docs/solver.md derives it in full.
//
// Only the part of the exchange that no plan can hide counts, on one link for all sequences: the one with the higher
// bound.
#pragma once

#include <span>

#include "knapformer/core/plan/plan.h"
#include "knapformer/core/plan/plan_json.h"

namespace knapformer {

/// A lower bound of predict_step's total: without sequences, FSDP and the fixed time. O(n log n).
double lower_bound_s(const PlanInput& input);
/// The plan's predicted time, and this bound.
PlanPrediction prediction_of(const Plan& plan);

/// A lower bound of one replica's blocks (ReplicaTime::block_s). `topology`: over the same ranks as the input's.
double replica_lower_bound_s(const PlanInput& input, const Topology& topology, int32_t replica);

}  // namespace knapformer
