// Planners: lengths of all ranks -> Plan.
//
// A planner is deterministic: the same input gives the same plan, bit for bit, on every rank and machine, so that no
// rank sends a plan to another. Ties are broken by id.
#pragma once

#include <optional>
#include <span>
#include <string_view>

#include "knapformer/core/plan/plan.h"
#include "knapformer/core/planners/balanced/effort.h"

namespace knapformer {

/// A line of the registry in planner.cpp: what adding a planner takes beside its own files.
struct Planner {
  std::string_view name;
  /// Of valid input. The limit of tokens is checked by make_plan.
  Plan (*plan)(PlanInput input, Effort effort);
  bool plans_nested_bags = false;
};

/// The default first.
std::span<const Planner> planners();
/// Throws ArgumentError (argument "solver") for an unknown name.
const Planner& planner_named(std::string_view name);

/// The planner of that name, for these bags and this effort. Throws ArgumentError (argument "solver" or "effort") where
/// it cannot plan them.
const Planner& planner_for(const Topology& topology, std::string_view solver, Effort effort);

/// Plans with the named planner. Throws ArgumentError for an unknown name, invalid input, or a limit of tokens per rank
/// that the plan does not keep; then it names one that the planner keeps, which it plans a few times more to find.
Plan make_plan(PlanInput input, std::string_view solver, Effort effort = {});
/// The same, with nothing in place of a plan that does not keep the limit.
std::optional<Plan> plan_within_limit(PlanInput input, std::string_view solver, Effort effort = {});

}  // namespace knapformer
