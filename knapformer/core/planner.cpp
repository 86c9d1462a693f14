#include "knapformer/core/planner.h"

#include <algorithm>
#include <array>

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
  int64_t fullest_replica = 0;
  for (int32_t replica = 0; replica < topology.num_replicas(); ++replica) {
    int64_t tokens = 0;
    for (int32_t i = 0; i < topology.num_ranks_per_replica(); ++i) {
      tokens += plan.tokens_after()[static_cast<size_t>(replica * topology.num_ranks_per_replica() + i)];
    }
    fullest_replica = std::max(fullest_replica, tokens);
  }
  const int64_t least = (fullest_replica + topology.num_ranks_per_replica() - 1) / topology.num_ranks_per_replica();
  if (least > limit) {
    throw_argument(
        "max_tokens_per_rank", limit,
        text("at least ", least, ": a replica of ", topology.num_ranks_per_replica(), " ranks has ", fullest_replica,
             " tokens, ", fullest_replica - limit * topology.num_ranks_per_replica(), " more than it may hold"));
  }
  int64_t longest = 0;
  for (const int64_t length : plan.seq_lens().lens()) longest = std::max(longest, length);
  const int32_t sharing = topology.shapes().back().num_ranks_per_bag();  // small bags first
  const int64_t share = (longest + sharing - 1) / sharing;
  if (share > limit) {
    throw_argument(
        "max_tokens_per_rank", limit,
        text("at least ", share, ": a sequence of ", longest, " tokens is shared by at most ", sharing,
             sharing == 1 ? " rank" : " ranks", ", ", share - limit, " more tokens each than they may hold"));
  }
  throw_argument("max_tokens_per_rank", limit,
                 text("at least ", plan.max_tokens(), ", which the fullest rank of the best plan found with topology ",
                      topology.str(), " and solver '", plan.solver(), "' holds (", plan.max_tokens() - limit,
                      " more); bags of more ranks can share what does not fit"));
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
