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
//
// Several micro-batches. Let a step's blocks take T in all: the sum over micro-batches of the slowest rank's block
// time, or, where ranks wait once, the slowest rank's sum. A rank spends at most T in all micro-batches together. Each
// of the g ranks that share a sequence spends at most its micro-batch's time on it, so also at most T. All that follows
// from these two facts for one micro-batch therefore holds for the step with all its sequences. The FSDP time that is
// not hidden is convex in a micro-batch's block time, so its sum over micro-batches is lowest where all take equally
// long.
#pragma once

#include <algorithm>

#include "knapformer/core/plan/step_plan.h"

namespace knapformer {

/// A lower bound of predict_accumulated's total: without sequences, FSDP and the fixed time. O(n log n).
double lower_bound_s(const StepInput& input);
/// A lower bound of the sum over all micro-batches of ReplicaTime::block_s, in the slowest replica. O(n log n).
double blocks_lower_bound_s(const StepInput& input);
/// The same of one replica. `topology`: over the same ranks as the input's.
double replica_lower_bound_s(const PlanInput& input, const Topology& topology, int32_t replica);

/// The predicted time of a plan, and the lower bound, in seconds.
struct PlanPrediction {
  double predicted_time_s = 0;
  double lower_bound_s = 0;

  /// How far the predicted time may be above the best, relative to the bound. 0 without work.
  double gap() const { return lower_bound_s > 0 ? std::max(predicted_time_s / lower_bound_s - 1, 0.0) : 0; }
};
PlanPrediction prediction_of(const StepPlan& plan);

}  // namespace knapformer
