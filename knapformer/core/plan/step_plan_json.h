// Plans of steps as JSON text, out and in.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "knapformer/core/plan/plan_json.h"
#include "knapformer/core/plan/step_plan.h"

namespace knapformer {

/// Input, decision and what follows from it; docs/plan_format.md describes the fields. `of_plans`: of each micro-batch.
std::string step_plan_to_json(const StepPlan& plan, const PlanPrediction& prediction,
                              std::span<const PlanPrediction> of_plans);
/// The plan that step_plan_to_json wrote; what follows from the decision is computed anew. Validated. Throws
/// ArgumentError (argument "plan") where the text is no such JSON, naming the field.
StepPlan step_plan_from_json(std::string_view json);

}  // namespace knapformer
