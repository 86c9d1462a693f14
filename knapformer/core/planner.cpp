#include "knapformer/core/planner.h"

#include <algorithm>
#include <array>
#include <numeric>

#include "knapformer/core/balanced_solver.h"
#include "knapformer/core/error.h"
#include "knapformer/core/greedy_solver.h"

namespace knapformer {
namespace {

constexpr std::array<std::string_view, 2> kSolverNames = {"balanced", "greedy"};

/// Throws where a rank holds more than the input allows.
void check_token_limit(const Plan& plan) {
  const int64_t limit = plan.input().max_tokens_per_rank;
  if (limit == 0 || plan.max_tokens() <= limit) return;
  const Topology& topology = plan.topology();
  const int32_t num_ranks = topology.num_ranks_per_replica();
  int64_t most = 0;  // tokens of a replica
  for (int32_t replica = 0; replica < topology.num_replicas(); ++replica) {
    const auto tokens = plan.tokens_after().subspan(static_cast<size_t>(replica * num_ranks));
    most = std::max(most, std::accumulate(tokens.begin(), tokens.begin() + num_ranks, int64_t{0}));
  }
  const auto lens = plan.seq_lens().lens();
  const int64_t longest = *std::max_element(lens.begin(), lens.end());
  const int32_t sharing = topology.shapes().back().num_ranks_per_bag();  // small bags first
  const auto share = [](int64_t tokens, int32_t ranks) { return (tokens + ranks - 1) / ranks; };
  const int64_t of_replica = share(most, num_ranks), of_longest = share(longest, sharing);
  if (std::max(of_replica, of_longest) <= limit) {
    throw_argument("max_tokens_per_rank", limit,
                   text(plan.max_tokens(), ", ", plan.max_tokens() - limit, " more: the least that solver '",
                        plan.solver(), "' found with topology ", topology.str(),
                        "; with more effort, or in bags of more ranks, less may be possible"));
  }
  if (of_replica >= of_longest) {
    throw_argument("max_tokens_per_rank", limit,
                   text("at least ", of_replica, ": a replica of ", num_ranks, " ranks has ", most, " tokens, ",
                        most - limit * num_ranks, " more than it may hold"));
  }
  throw_argument(
      "max_tokens_per_rank", limit,
      text("at least ", of_longest, ": a sequence of ", longest, " tokens is shared by at most ", sharing,
           sharing == 1 ? " rank" : " ranks", ", ", of_longest - limit, " more tokens each than they may hold"));
}

}  // namespace

Effort Effort::parse(std::string_view name) {
  if (name == "low") return {.moves = kLow};
  if (name == "default") return {.moves = kDefault};
  if (name == "high") return {.moves = kHigh};
  throw_argument("effort", text("'", name, "'"), "'low', 'default', 'high' or a number of moves of at least 0");
}

std::span<const std::string_view> solver_names() { return kSolverNames; }

Plan make_plan(PlanInput input, std::string_view solver, Effort effort) {
  if (solver == "balanced") return plan_balanced(std::move(input), effort);
  if (solver == "greedy") return plan_greedy(std::move(input));
  throw_argument("solver", text("'", solver, "'"), "'balanced' or 'greedy'");
}

Plan plan_greedy(PlanInput input) {
  input.validate();
  if (!input.topology.is_flat()) {
    throw_argument("solver", text("'greedy' for topology ", input.topology.str()), "flat bags, such as g8n4");
  }
  std::vector<Placement> placements = greedy_placements(input, input.topology);
  Plan plan(std::move(input), "greedy", std::move(placements));
  check_token_limit(plan);
  return plan;
}

Plan plan_balanced(PlanInput input, Effort effort) {
  input.validate();
  if (effort.moves < Effort::kHigh) throw_argument("effort", effort.moves, "a number of moves of at least 0");
  Plan plan = BalancedSolver(std::move(input), effort.moves).solve();
  check_token_limit(plan);
  return plan;
}

}  // namespace knapformer
