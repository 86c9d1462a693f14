#include "knapformer/core/planners/planner.h"

#include <algorithm>
#include <array>

#include "knapformer/core/planners/attention_cuts_and_stages.h"
#include "knapformer/core/planners/balanced/balanced.h"
#include "knapformer/core/planners/greedy/greedy.h"
#include "knapformer/core/planners/token_limits.h"

namespace knapformer {
namespace {

constexpr std::array<Planner, 3> kPlanners = {{
    {.name = "balanced", .plan = plan_balanced, .plans_nested_bags = true},
    {.name = "greedy", .plan = [](PlanInput in, Effort) { return plan_greedy(std::move(in), Capacity::kWhole); }},
    {.name = "greedy_remaining",
     .plan = [](PlanInput in, Effort) { return plan_greedy(std::move(in), Capacity::kRemaining); }},
}};

/// The plan, whether it keeps its limit or not.
MicroBatchPlan planned(PlanInput input, std::string_view solver, Effort effort) {
  const Planner& planner = planner_for(input.topology, solver, effort);
  input.validate();
  if (input.attention_cuts.empty()) cut_attention(input);
  return planner.plan(std::move(input), effort);
}

}  // namespace

std::span<const Planner> planners() { return kPlanners; }

const Planner& planner_named(std::string_view name) {
  const auto found = std::ranges::find(kPlanners, name, &Planner::name);
  if (found != kPlanners.end()) return *found;
  std::string expected;
  for (const Planner& planner : kPlanners) expected += text(expected.empty() ? "'" : " or '", planner.name, "'");
  throw_argument("solver", text("'", name, "'"), expected);
}

const Planner& planner_for(const Topology& topology, std::string_view solver, Effort effort) {
  const Planner& planner = planner_named(solver);
  effort.validate();
  if (!planner.plans_nested_bags && !topology.is_flat())
    throw_argument("solver", text("'", solver, "' for topology ", topology.str()), "flat bags, such as g8n4");
  return planner;
}

std::optional<MicroBatchPlan> plan_within_limit(PlanInput input, std::string_view solver, Effort effort) {
  MicroBatchPlan plan = planned(std::move(input), solver, effort);
  if (!plan.keeps_limit()) return std::nullopt;
  return plan;
}

MicroBatchPlan plan_micro_batch(PlanInput input, std::string_view solver, Effort effort) {
  MicroBatchPlan plan = planned(std::move(input), solver, effort);
  if (plan.keeps_limit()) return plan;
  refuse_unkept(plan, [&](PlanInput in) { return planner_named(plan.solver()).plan(std::move(in), effort); });
}

}  // namespace knapformer
