// Plans as JSON text, out and in.
#pragma once

#include <string>
#include <string_view>

#include "knapformer/core/plan.h"

namespace knapformer {

/// Input, decision and what follows from it; docs/plan_format.md describes the fields.
std::string plan_to_json(const Plan& plan);
/// The plan that plan_to_json wrote; what follows from the decision is computed anew. Validated. Throws ArgumentError
/// (argument "plan") where the text is no such JSON, naming the field.
Plan plan_from_json(std::string_view json);

}  // namespace knapformer
