#include "knapformer/core/planners/planner.h"

#include <algorithm>
#include <array>
#include <numeric>

#include "knapformer/core/cost/query_cuts.h"
#include "knapformer/core/planners/balanced/solver.h"
#include "knapformer/core/planners/greedy/greedy.h"

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
[[noreturn]] void refuse(const MicroBatchPlan& plan, const Planner& planner, Effort effort) {
  const int64_t limit = plan.input().max_tokens_per_rank;
  const Topology& topology = plan.topology();
  const int32_t num_ranks = topology.num_ranks_per_replica();
  int64_t max_replica = 0;  // tokens
  for (int32_t replica = 0; replica < topology.num_replicas(); ++replica) {
    const auto tokens =
        plan.tokens_after().subspan(static_cast<size_t>(replica) * static_cast<size_t>(num_ranks), num_ranks);
    max_replica = std::max(max_replica, std::accumulate(tokens.begin(), tokens.end(), int64_t{0}));
  }
  const int64_t longest = std::ranges::max(plan.seq_lens().lens());
  const int32_t sharing = topology.shapes().back().num_ranks_per_bag();  // small bags first
  const auto share = [](int64_t tokens, int32_t ranks) { return (tokens + ranks - 1) / ranks; };
  const int64_t of_replica = share(max_replica, num_ranks), of_longest = share(longest, sharing);
  const int64_t min_limit = std::max(of_replica, of_longest);
  const int64_t kept = kept_limit(plan.input(), planner, effort, min_limit > limit ? min_limit : plan.max_tokens());
  if (kept != min_limit) {
    throw_argument<TokenLimitError>(
        "max_tokens_per_rank", limit,
        text(kept, ", ", kept - limit, " more: the minimum that solver '", plan.solver(), "' found with topology ",
             topology.str(), "; with more effort, or in bags of more ranks, less may be possible"));
  }
  if (of_replica >= of_longest) {
    throw_argument<TokenLimitError>(
        "max_tokens_per_rank", limit,
        text("at least ", of_replica, ": a replica of ", num_ranks, " ranks has ", max_replica, " tokens, ",
             max_replica - limit * num_ranks, " more than it may hold"));
  }
  throw_argument<TokenLimitError>(
      "max_tokens_per_rank", limit,
      text("at least ", of_longest, ": a sequence of ", longest, " tokens is shared by at most ", sharing,
           sharing == 1 ? " rank" : " ranks", ", ", of_longest - limit, " more tokens each than they may hold"));
}

/// The plan, whether it keeps its limit or not.
MicroBatchPlan planned(PlanInput input, const Planner& planner, Effort effort) {
  input.validate();
  if (input.query_cuts.empty()) cut_queries(input);
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
  const Planner& planner = planner_for(input.topology, solver, effort);
  MicroBatchPlan plan = planned(std::move(input), planner, effort);
  if (!plan.keeps_limit()) return std::nullopt;
  return plan;
}

MicroBatchPlan plan_micro_batch(PlanInput input, std::string_view solver, Effort effort) {
  const Planner& planner = planner_for(input.topology, solver, effort);
  MicroBatchPlan plan = planned(std::move(input), planner, effort);
  if (!plan.keeps_limit()) refuse(plan, planner, effort);
  return plan;
}

}  // namespace knapformer
