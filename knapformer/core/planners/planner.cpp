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

/// The first limit that the planner keeps, of those tried from `limit` on. The planner may fail to keep even a limit
/// that its plan for another limit happens to keep, since each limit leads the search another way.
int64_t kept_limit(PlanInput input, const Planner& planner, Effort effort, int64_t limit) {
  for (;;) {
    input.max_tokens_per_rank = limit;
    const MicroBatchPlan plan = planner.plan(input, effort);
    if (plan.keeps_limit()) return limit;
    limit = plan.max_tokens();
  }
}

/// Throws for a plan that does not keep its limit. The error names a limit that this planner keeps.
[[noreturn]] void refuse(const MicroBatchPlan& plan, Effort effort) {
  const Planner& planner = planner_named(plan.solver());
  const int64_t limit = plan.input().max_tokens_per_rank, least = least_token_limit(plan.input(), 1);
  const int64_t kept = kept_limit(plan.input(), planner, effort, least > limit ? least : plan.max_tokens());
  if (kept == least) refuse_below_least(plan.input(), 1);
  throw_argument<TokenLimitError>(
      "max_tokens_per_rank", limit,
      text(kept, ", ", kept - limit, " more: the minimum that solver '", plan.solver(), "' found with topology ",
           plan.topology().str(), "; with more effort, or in bags of more ranks, less may be possible"));
}

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
  if (!plan.keeps_limit()) refuse(plan, effort);
  return plan;
}

}  // namespace knapformer
