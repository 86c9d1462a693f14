// What a step of several micro-batches takes, and what none can be below.
//
// With StepSync::kMicroBatch a micro-batch costs what predict_step says, FSDP's gathers and the fixed time included,
// and the step is the sum. With kStep each rank goes on as soon as it is done: ranks that share a sequence start when
// the last of them comes, and the step ends with the slowest rank. There gradients are reduced once, behind the last
// micro-batch, and route counts as if nobody waited in it.
//
// Note on the bound. Let a step's blocks take T in all: the sum over micro-batches of the slowest rank's block time, or
// the slowest rank's sum. What a rank spends in all micro-batches is at most T, and each of the g ranks that share a
// sequence spends on it at most its micro-batch's time, so at most T. All that bounds.h derives from these two facts
// for one micro-batch thus holds for the step with all its sequences. What FSDP does not hide is convex in the block
// time of a micro-batch, so the sum over micro-batches is least where all take equally long.
#pragma once

#include <span>
#include <vector>

#include "knapformer/core/cost/step_time.h"
#include "knapformer/core/plan/plan_json.h"
#include "knapformer/core/plan/step_plan.h"

namespace knapformer {

/// Adds up the micro-batches of a step, in their order.
class StepClock {
 public:
  explicit StepClock(const StepInput& input);

  /// The micro-batch by itself: predict_step's.
  StepTime add(const Plan& micro_batch);
  /// Of what was added, in seconds.
  double total_s() const;
  /// What the step takes at least when these micro-batches follow.
  double lower_bound_s(std::span<const PlanInput> left) const;

 private:
  const StepInput& input_;
  double sum_s_ = 0;            // predicted steps; with kStep what is not a rank's own
  double fsdp_s_ = 0;           // with kStep, behind the micro-batch added last
  std::vector<double> rank_s_;  // with kStep: when each rank is done
};

struct AccumulatedTime {
  double total_s = 0;
  /// The work divided evenly over the ranks, and the fixed time of each micro-batch.
  double ideal_s = 0;
  /// By micro-batch, what predict_step says. They add up to the total where ranks wait in each.
  std::vector<double> micro_batch_s;
};

/// O(chunks).
AccumulatedTime predict_accumulated(const StepPlan& plan);

/// Of a replica's blocks by micro-batch (ReplicaTime::block_s): the step, without route and the fixed time.
double accumulated_s(const StepInput& input, std::span<const double> block_s);
/// What the blocks of all micro-batches take at least, as accumulated_s has them. O(n log n).
double blocks_lower_bound_s(const StepInput& input);
/// Seconds of a step, like predict_accumulated's total; `blocks_s` is blocks_lower_bound_s.
double lower_bound_s(const StepInput& input, double blocks_s);
double lower_bound_s(const StepInput& input);
PlanPrediction prediction_of(const StepPlan& plan);

}  // namespace knapformer
