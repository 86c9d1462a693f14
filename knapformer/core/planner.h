// Planners: lengths of all ranks -> Plan.
//
// A planner is deterministic: the same input gives the same plan, bit for bit, on every rank and machine, so that no
// rank sends a plan to another. Ties are broken by id.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "knapformer/core/plan.h"

namespace knapformer {

/// How much a planner searches, in moves tried for each replica: it does not depend on the machine. From 0 on it is
/// that number; below, a name for a number that grows with the sequences. Greedy does not search.
struct Effort {
  static constexpr int64_t kLow = 0;  // constructive only: who plans in the step
  static constexpr int64_t kDefault = -1;
  static constexpr int64_t kHigh = -2;  // 50 times the default

  int64_t moves = kDefault;

  /// "low", "default", "high". Throws ArgumentError (argument "effort").
  static Effort parse(std::string_view name);
};

/// Names that make_plan knows.
std::span<const std::string_view> solver_names();

/// Plans with the named solver. Throws ArgumentError for an unknown name, invalid input, or a limit of tokens per rank
/// that the plan does not keep.
Plan make_plan(PlanInput input, std::string_view solver, Effort effort = {});

/// greedy_solver.h.
Plan plan_greedy(PlanInput input);
/// balanced_solver.h.
Plan plan_balanced(PlanInput input, Effort effort = {});

}  // namespace knapformer
