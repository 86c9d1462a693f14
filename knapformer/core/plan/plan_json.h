// Plans as JSON text, out and in.
#pragma once

#include <string>
#include <string_view>

#include "knapformer/core/plan/plan.h"

namespace knapformer {

/// What a plan is predicted to take, for its readers: in seconds, see cost/.
struct PlanPrediction {
  double predicted_time_s = 0;
  double lower_bound_s = 0;  // no plan of this input takes less

  /// How far the predicted time may be from the best. 0 without work.
  double gap() const { return lower_bound_s > 0 ? predicted_time_s / lower_bound_s - 1 : 0; }
};

/// Input, decision and what follows from it; docs/plan_format.md describes the fields.
std::string plan_to_json(const Plan& plan, const PlanPrediction& prediction);
/// The plan that plan_to_json wrote; what follows from the decision is computed anew. Validated. Throws ArgumentError
/// (argument "plan") where the text is no such JSON, naming the field.
Plan plan_from_json(std::string_view json);

}  // namespace knapformer
