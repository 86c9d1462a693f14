// Plans as JSON text, out and in.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "knapformer/core/plan/plan.h"

namespace knapformer {

/// Input, decision and what follows from the decision; docs/plan_format.md describes the fields. A step of one
/// micro-batch is written as its plan.
std::string plan_to_json(const Plan& plan);
/// Reads the plan that plan_to_json wrote. What follows from the decision is computed anew, and the plan is validated.
/// Throws ArgumentError (argument "plan"), which names the field, if the text is no such JSON.
Plan plan_from_json(std::string_view json);

/// Names and texts of what plans go by beside the topology and the sequences: ("cluster.flops_per_s", "2.98e+14").
std::vector<std::pair<std::string, std::string>> setting_texts(const PlanInput& input);

}  // namespace knapformer
