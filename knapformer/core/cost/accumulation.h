// The predicted time of a step of several micro-batches, and its lower bound.
//
// With StepSync::kMicroBatch a micro-batch costs what predict_step says, FSDP's gathers and the fixed time included,
// and the step is the sum. With kStep each rank goes on as soon as it is done: ranks that share a sequence start when
// the last of them arrives, and the step ends with the slowest rank. Then gradients are reduced once, after the last
// micro-batch, and route is counted as if no rank waited in it.
//
// Note on the bound. Let a step's blocks take T in all: the sum over micro-batches of the slowest rank's block time, or
// the slowest rank's sum. A rank spends at most T in all micro-batches together. Each of the g ranks that share a
// sequence spends at most its micro-batch's time on it, so also at most T. All that bounds.h derives from these two
// facts for one micro-batch therefore holds for the step with all its sequences. The FSDP time that is not hidden is
// convex in a micro-batch's block time, so its sum over micro-batches is lowest where all take equally long.
#pragma once

#include <span>
#include <vector>

#include "knapformer/core/cost/step_time.h"
#include "knapformer/core/plan/plan_json.h"
#include "knapformer/core/plan/step_plan.h"

namespace knapformer {

struct AccumulatedTime {
  double total_s = 0;
  /// The time of the work divided evenly over the ranks, and the fixed time of each micro-batch.
  double ideal_s = 0;
  /// By micro-batch, the time that predict_step says. These add up to the total if ranks wait in each micro-batch.
  std::vector<double> micro_batch_s;
};

/// O(chunks).
AccumulatedTime predict_accumulated(const StepPlan& plan);

/// The time of a step without route and the fixed time. `block_s`: a replica's blocks (ReplicaTime::block_s), by
/// micro-batch.
double accumulated_s(const StepInput& input, std::span<const double> block_s);
/// A lower bound of the sum of `block_s` over all micro-batches. O(n log n).
double blocks_lower_bound_s(const StepInput& input);
/// A lower bound of predict_accumulated's total. `blocks_s`: from blocks_lower_bound_s.
double lower_bound_s(const StepInput& input, double blocks_s);
double lower_bound_s(const StepInput& input);
PlanPrediction prediction_of(const StepPlan& plan);

}  // namespace knapformer
