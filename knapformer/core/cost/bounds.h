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
// Several micro-batches. Let L be the longest one's block time (of its slowest rank), and T that of all together. A
// sequence has to fit into L, and a rank spends at most T in all micro-batches together. So L decides the degrees, and
// these T. What a step takes is convex in its micro-batches' block times, as the FSDP time that is not hidden is: it is
// lowest where those beside the longest take equally long. The bound is the lowest over all L. Where ranks wait once, L
// and T are the slowest rank's sum.
#pragma once

#include <algorithm>

#include "knapformer/core/plan/plan.h"

namespace knapformer {

/// A lower bound of predict_step's total: without sequences, FSDP and the fixed time. O(n log n).
double lower_bound_s(const StepInput& input);
/// A lower bound of the slowest replica's MicroBatchTime::replica_block_s, summed over micro-batches. O(n log n).
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
PlanPrediction prediction_of(const Plan& plan);

}  // namespace knapformer
