// Lower bounds of the time of any plan of an input; docs/solver.md derives them.
//
// In a plan of block time T, a sequence that g ranks share fits into their time: w(l) + x_g(l) <= T * (their speed). So
// it has a smallest degree, with which it costs its bag the least rank time. The bound is the smallest T at which all
// sequences have one, and these rank times add up to at most T * (speed of all ranks). Of the exchange counts what no
// plan can hide, on one link for all sequences: that with the higher bound. Of several micro-batches the longest one's
// time decides the degrees.
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
