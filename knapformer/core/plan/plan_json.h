// Plans as JSON text, out and in.
#pragma once

#include <algorithm>
#include <span>
#include <string>
#include <string_view>

#include "knapformer/core/plan/step_plan.h"

namespace knapformer {

/// The predicted time of a plan and its lower bound, in seconds: see cost/.
struct PlanPrediction {
  double predicted_time_s = 0;
  double lower_bound_s = 0;  // no plan of this input is faster

  /// How far the predicted time may be above the best, relative to the bound. 0 without work.
  double gap() const { return lower_bound_s > 0 ? std::max(predicted_time_s / lower_bound_s - 1, 0.0) : 0; }
};

/// Input, decision and what follows from the decision; docs/plan_format.md describes the fields. of_plans: the
/// prediction of each micro-batch. A step of one micro-batch is written as its plan.
std::string plan_to_json(const StepPlan& plan, const PlanPrediction& prediction,
                         std::span<const PlanPrediction> of_plans);
/// Reads the plan that plan_to_json wrote. What follows from the decision is computed anew, and the plan is validated.
/// Throws ArgumentError (argument "plan"), which names the field, if the text is no such JSON.
StepPlan plan_from_json(std::string_view json);

}  // namespace knapformer
