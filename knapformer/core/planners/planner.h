// Planners make a MicroBatchPlan from the lengths of all ranks.
//
// A planner is deterministic: the same input gives the same plan, bit for bit, on every rank and machine, so no rank
// has to send a plan to another. Ties are broken by id.
#pragma once

#include <optional>
#include <span>
#include <string_view>

#include "knapformer/core/plan/micro_batch_plan.h"
#include "knapformer/core/planners/balanced/effort.h"

namespace knapformer {

/// An entry of the registry in planner.cpp. A new planner needs its own files and one entry, nothing else.
struct Planner {
  std::string_view name;
  /// The input must be valid. plan_micro_batch checks the limit of tokens.
  MicroBatchPlan (*plan)(PlanInput input, Effort effort);
  bool plans_nested_bags = false;
};

/// The default comes first.
std::span<const Planner> planners();
/// Throws ArgumentError (argument "solver") for an unknown name.
const Planner& planner_named(std::string_view name);

/// The planner of that name, for these bags and this effort. Throws ArgumentError (argument "solver" or "effort") if
/// the planner cannot plan them.
const Planner& planner_for(const Topology& topology, std::string_view solver, Effort effort);

/// Plans with the named planner. Throws ArgumentError for an unknown name or invalid input, and TokenLimitError if the
/// plan does not keep the limit of tokens per rank. The latter names a limit that the planner keeps, which takes a few
/// more plans to find.
MicroBatchPlan plan_micro_batch(PlanInput input, std::string_view solver, Effort effort = {});
/// The same, but returns nothing if the plan does not keep the limit.
std::optional<MicroBatchPlan> plan_within_limit(PlanInput input, std::string_view solver, Effort effort = {});

}  // namespace knapformer
