// Plans of steps as JSON text, out and in.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "knapformer/core/plan/plan_json.h"
#include "knapformer/core/plan/step_plan.h"

namespace knapformer {

/// Input, decision and what follows from the decision; docs/plan_format.md describes the fields. `of_plans`: the
/// prediction of each micro-batch. A step of one micro-batch is written as its plan.
std::string step_plan_to_json(const StepPlan& plan, const PlanPrediction& prediction,
                              std::span<const PlanPrediction> of_plans);
/// Reads the plan that step_plan_to_json wrote. What follows from the decision is computed anew, and the plan is
/// validated. Throws ArgumentError (argument "plan"), which names the field, if the text is no such JSON.
StepPlan step_plan_from_json(std::string_view json);

}  // namespace knapformer
