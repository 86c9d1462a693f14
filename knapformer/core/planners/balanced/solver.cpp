#include "knapformer/core/planners/balanced/solver.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>
#include <vector>

#include "knapformer/core/cost/bounds.h"
#include "knapformer/core/cost/step_time.h"
#include "knapformer/core/plan/load_balance.h"
#include "knapformer/core/planners/balanced/anneal.h"
#include "knapformer/core/planners/balanced/construct.h"
#include "knapformer/core/planners/balanced/locality.h"
#include "knapformer/core/planners/balanced/uneven_chunks.h"
#include "knapformer/core/planners/greedy/greedy.h"
#include "knapformer/core/util/error.h"
#include "knapformer/core/util/infinity.h"

namespace knapformer {
namespace {

/// Further above the bound, another construction is worth its time.
constexpr double kFar = 1.05;
/// Bags that are this even need no more: tokens that do not divide leave about as much.
constexpr double kEvenEnough = 1.00005;

/// What a replica of a plan is judged by.
struct ReplicaFigures {
  double step_s = 0;          // predicted, the fixed time aside
  double block_s = 0;         // of it, of one block
  double max_over_mean = 1;   // work of a rank, over its speed
  int64_t excess_tokens = 0;  // of the fullest rank, beyond what it may hold

  bool keeps_limit() const { return excess_tokens == 0; }
  /// Closer to the limit; or faster, by more than what sums in another order differ in.
  bool is_better_than(const ReplicaFigures& other) const {
    if (excess_tokens != other.excess_tokens) return excess_tokens < other.excess_tokens;
    return step_s < other.step_s * (1 - 1e-12);
  }
  /// Closer to the limit; or neither less even nor slower in its blocks.
  bool is_no_worse_than(const ReplicaFigures& other) const {
    if (excess_tokens != other.excess_tokens) return excess_tokens < other.excess_tokens;
    return block_s <= other.block_s && max_over_mean <= other.max_over_mean;
  }
};

/// Of each replica.
std::vector<ReplicaFigures> figures_of(const Plan& plan) {
  const PlanInput& input = plan.input();
  const StepTime time = predict_step(plan);
  const auto num_ranks = static_cast<size_t>(plan.topology().num_ranks_per_replica());
  std::vector<ReplicaFigures> figures(time.replicas.size());
  std::vector<double> work(plan.workload_after().begin(), plan.workload_after().end());
  for (size_t r = 0; r < work.size(); ++r) work[r] /= input.speed_of(Rank(r));
  for (size_t i = 0; i < figures.size(); ++i) {
    figures[i].step_s = time.replicas[i].step_s;
    figures[i].block_s = time.replicas[i].block_s;
    figures[i].max_over_mean = LoadBalance::of(std::span(work).subspan(i * num_ranks, num_ranks)).max_over_mean();
    if (input.max_tokens_per_rank == 0) continue;
    const int64_t max_tokens = std::ranges::max(plan.tokens_after().subspan(i * num_ranks, num_ranks));
    figures[i].excess_tokens = std::max(int64_t{0}, max_tokens - input.max_tokens_per_rank);
  }
  return figures;
}

/// Whether a replica has this mark.
bool contains(std::span<const char> marks, bool mark) {
  return std::find(marks.begin(), marks.end(), static_cast<char>(mark)) != marks.end();
}

/// The plan with some replicas, those marked, from another plan of the same input.
Plan merged(Plan plan, const Plan& other, std::span<const char> from_other) {
  if (!contains(from_other, false)) return other;
  if (!contains(from_other, true)) return plan;
  std::vector<Placement> placements;
  std::vector<int64_t> chunk_lens;
  for (int32_t s = 0; s < plan.num_sequences(); ++s) {
    const SequenceId id(s);
    const bool takes = from_other[plan.placement(id).bag.value / plan.topology().num_bags_per_replica()] != 0;
    const Plan& source = takes ? other : plan;
    placements.push_back(source.placement(id));
    for (const Chunk& chunk : source.chunks(id)) chunk_lens.push_back(chunk.num_tokens);
  }
  return Plan(plan.input(), plan.solver(), std::move(placements), std::move(chunk_lens));
}

/// A plan whose groups are some of this input's, as one of this input's bags.
Plan in_bags_of(const PlanInput& input, const Plan& plan) {
  std::vector<Placement> placements(plan.placements().begin(), plan.placements().end());
  for (Placement& place : placements) place.bag = input.topology.bag_of(place.first_rank);
  return Plan(input, "balanced", std::move(placements), plan.chunk_lens());
}

class BalancedSolver {
 public:
  /// `effort` as in Effort::moves.
  BalancedSolver(PlanInput input, int64_t effort)
      : input_(std::move(input)),
        effort_(effort),
        placements_(static_cast<size_t>(input_.seq_lens.num_sequences())),
        bounds_s_(static_cast<size_t>(input_.topology.num_replicas())),
        is_greedy_(bounds_s_.size()),
        starts_(bounds_s_.size()) {}

  Plan solve() {
    if (input_.topology.is_flat()) return solve_all_flat(std::vector<char>(bounds_s_.size(), 1), FlatGoal::kEven);
    for (size_t r = 0; r < bounds_s_.size(); ++r)
      bounds_s_[r] = replica_lower_bound_s(input_, input_.topology, static_cast<int32_t>(r));
    if (effort_ == Effort::kLow) place_greedily();
    for (size_t r = 0; r < bounds_s_.size(); ++r) {
      if (!is_greedy_[r]) solve(static_cast<int32_t>(r), Objective::kTime);
    }
    Plan plan = finish(placements_);
    std::vector<ReplicaFigures> figures = figures_of(plan);
    plan = with_other_construction(std::move(plan), figures);
    return with_flat_replicas(std::move(plan), std::move(figures));
  }

 private:
  /// What a plan of flat bags is to be better in: even work, without slower blocks (the published measure), or, as a
  /// candidate beside a nested plan, the whole step.
  enum class FlatGoal { kEven, kStep };

  /// Improves the placement, whose slowest group takes `time`. High effort goes on from the result of the default.
  void search(PlacementTrees& trees, std::vector<int32_t>& node_of_item, int32_t replica, double time,
              SearchOptions options) const {
    options.key = random_key(input_, replica);
    const auto anneal = [&](double start, int64_t effort) {
      options.num_moves = num_moves(trees, effort);
      improve(trees, node_of_item, start, options);
    };
    anneal(time, effort_ == Effort::kHigh ? Effort::kDefault : effort_);
    if (effort_ == Effort::kHigh) anneal(std::min(time, trees.slowest()), effort_);
  }

  /// Leaves sequences whole, as greedy places them, in replicas where that is good enough.
  void place_greedily() {
    const Topology smallest = input_.topology.flat_topologies().front();
    const bool is_whole = smallest.shapes().size() == 1 && smallest.shapes().front().num_ranks_per_bag() == 1;
    if (!is_whole || input_.max_tokens_per_rank > 0) return;
    const auto is_good = [&](size_t r, double time_s) {
      return time_s <= bounds_s_[r] * Effort::kGoodEnoughAtLowEffort;
    };
    for (size_t r = 0; r < is_greedy_.size(); ++r)
      is_greedy_[r] = is_good(r, replica_lower_bound_s(input_, smallest, static_cast<int32_t>(r)));
    if (!contains(is_greedy_, true)) return;
    placements_ = greedy_placements(input_, smallest);
    for (size_t r = 0; r < is_greedy_.size(); ++r) {
      is_greedy_[r] =
          is_greedy_[r] && is_good(r, flat_lower_bound_s(input_, smallest, static_cast<int32_t>(r), placements_));
    }
    for (Placement& place : placements_) place.bag = input_.topology.bag_of(place.first_rank);
  }

  /// Whether there is a placement, and another one than before.
  bool solve(int32_t replica, Objective objective, Construction::FitBy fit_by = Construction::FitBy::kTime) {
    PlacementTrees trees(input_, replica, objective);
    if (trees.items().empty()) return false;
    const auto place_all = [&] {
      return objective == Objective::kTime ? placed_nested(trees, replica, fit_by) : placed_flat(trees, replica);
    };
    std::vector<int32_t> node_of_item = place_all();
    if (node_of_item.empty()) return false;
    if (input_.max_tokens_per_rank > 0) {
      // A limit that is kept anyway costs nothing.
      trees.set_token_limit(input_.max_tokens_per_rank);
      if (!trees.keeps_limit()) {
        starts_[replica].clear();
        node_of_item = place_all();
      }
    }
    for (size_t i = 0; i < node_of_item.size(); ++i)
      placements_[trees.items()[i].id.index()] = trees.placement(node_of_item[i]);
    return true;
  }

  /// The plan, with those replicas that stay far above their bound from another construction, where that is better.
  /// `best`: the plan's figures.
  Plan with_other_construction(Plan plan, std::vector<ReplicaFigures>& best) {
    std::vector<char> is_far(best.size());
    for (size_t r = 0; r < best.size(); ++r) {
      is_far[r] = !is_greedy_[r] && best[r].block_s > bounds_s_[r] * kFar &&
                  solve(static_cast<int32_t>(r), Objective::kTime, Construction::FitBy::kEvenTime);
    }
    if (!contains(is_far, true)) return plan;
    return with_better(std::move(plan), finish(placements_), is_far, best);
  }

  /// The plan, with those of the marked replicas from the other that are better there. `best`: the plan's figures.
  static Plan with_better(Plan plan, const Plan& other, std::span<const char> may_win,
                          std::vector<ReplicaFigures>& best) {
    const std::vector<ReplicaFigures> figures = figures_of(other);
    std::vector<char> wins(best.size());
    for (size_t r = 0; r < best.size(); ++r) {
      wins[r] = may_win[r] && figures[r].is_better_than(best[r]);
      if (wins[r]) best[r] = figures[r];
    }
    return merged(std::move(plan), other, wins);
  }

  /// The nodes of the items, which are left in the trees. None where it would start from the same as the last time.
  std::vector<int32_t> placed_nested(PlacementTrees& trees, int32_t replica, Construction::FitBy fit_by) {
    const double bound = std::max(1.0, bounds_s_[replica] / trees.unit_s());
    Construction fit(trees);
    std::vector<int32_t> best = fit.place_under_targets(fit_by, bound, effort_ == Effort::kLow ? 3 : 4).node_of_item;
    if (best == starts_[replica]) return {};  // the search would find the same
    starts_[replica] = best;
    SearchOptions options{.bound = bound, .good_enough = bound * Effort::kGoodEnough, .last_temperature = 0.0005};
    const auto time_from = [&](std::vector<int32_t>& placement) {
      trees.load(placement);
      search(trees, placement, replica, trees.slowest(), options);
      return trees.slowest();
    };
    const double time = time_from(best);
    if (std::isfinite(trees.node(0).token_capacity) && time > options.good_enough) {
      // Tokens are most even where every sequence is shared by as many ranks as possible; it takes a hot start from
      // there.
      std::vector<int32_t> spread;
      fit.place_all(0, Construction::FitBy::kTime, spread);
      options.first_temperature = 32;
      if (time_from(spread) < time) {
        best.swap(spread);
      } else {
        trees.load(best);
      }
    }
    return best;
  }

  std::vector<int32_t> placed_flat(PlacementTrees& trees, int32_t replica) const {
    std::vector<int32_t> nodes;  // greedy
    for (const TreeItem& item : trees.items()) nodes.push_back(trees.node_of(placements_[item.id.index()]));
    trees.load(nodes);
    if (!are_few(trees) && num_moves(trees, effort_) == 0) return nodes;
    // Tokens that do not divide make ranks of a bag differ by one, which the trees does not see.
    double mean_time = 0, time_of_a_token = 0;
    int32_t num_ranks = 0;
    for (int32_t bag = 0; bag < trees.num_bags(); ++bag) {
      const PlacementTrees::Node& node = trees.node(trees.root(bag));
      mean_time += trees.time_with_exchange(bag) * node.degree;
      num_ranks += node.degree;
      time_of_a_token = std::max(time_of_a_token, node.time_per_token * node.degree + node.exchange_per_token);
    }
    mean_time /= num_ranks;
    const auto search_for = [&](const PlacementTrees::FlatGoal& goal, double bound) {
      trees.set_flat_goal({.of_time = goal.of_time});
      const double time = trees.slowest();  // without what is beyond a limit
      trees.set_flat_goal(goal);
      search(trees, nodes, replica, time,
             {.bound = bound, .good_enough = bound * kEvenEnough, .last_temperature = 1e-6});
    };
    if (!trees.keeps_limit()) search_for({}, 1);
    trees.set_flat_goal({});
    const double greedy_work = trees.slowest(), greedy_time = trees.slowest_with_exchange() - time_of_a_token;
    if (input_.topology.shapes().size() == 1) {
      // What is exchanged in all is the same however the bags are filled, so even work is nearly all there is to gain:
      // that first, without taking longer than greedy. Then the time, with the work as even.
      search_for({.of_time = false, .max_time = greedy_time}, 1);
      trees.set_flat_goal({});
      search_for({.of_time = true, .max_work = std::max(trees.slowest(), kEvenEnough)}, mean_time);
    } else {
      // Small bags exchange less. First the time, with the work no less even than greedy's; then the work.
      search_for({.of_time = true, .max_work = greedy_work}, 1);
      search_for({.of_time = false, .max_time = trees.slowest_with_exchange()}, 1);
    }
    return nodes;
  }

  Plan finish(std::vector<Placement> placements) const {
    bring_home(input_, placements);
    if (input_.topology.is_flat() && input_.rank_speed.empty()) return Plan(input_, "balanced", std::move(placements));
    std::vector<int64_t> chunk_lens = uneven_chunk_lens(input_, placements);
    return Plan(input_, "balanced", std::move(placements), std::move(chunk_lens));
  }

  /// The plan, with those replicas from plans of flat topologies that are better there. `best`: the plan's figures.
  Plan with_flat_replicas(Plan plan, std::vector<ReplicaFigures> best) const {
    std::vector<char> may_win(best.size());
    const std::vector<Topology> flats = input_.topology.flat_topologies();
    // Then a flat plan is greedy's; a limit of tokens, or few sequences, may have it search.
    const auto is_greedy = [&](int32_t replica) {
      const auto [first, last] = input_.sequences_of(replica);
      return effort_ == Effort::kLow && input_.max_tokens_per_rank == 0 && last.value - first.value > kFewItems;
    };
    std::vector<double> budgets_s;  // the longest block with which a flat plan could win
    const auto set_budgets = [&] {
      budgets_s.clear();
      for (const ReplicaFigures& figures : best) budgets_s.push_back(block_budget_s(input_, figures.step_s));
    };
    set_budgets();
    for (const Topology& topology : flats) {
      const bool is_smallest = &topology == &flats.front();
      for (size_t r = 0; r < best.size(); ++r) {
        const auto replica = static_cast<int32_t>(r);
        const auto may_be_below = [&](double block_s) {
          return is_greedy(replica) ? replica_lower_bound_s(input_, topology, replica) < block_s
                                    : flat_may_take_less(input_, topology, replica, block_s);
        };
        may_win[r] = !(is_smallest && is_greedy_[r]) && (!best[r].keeps_limit() || may_be_below(budgets_s[r]));
      }
      if (effort_ == Effort::kLow && contains(may_win, true)) {
        const std::vector<Placement> greedy = greedy_placements(input_, topology);
        for (size_t r = 0; r < best.size(); ++r) {
          const auto replica = static_cast<int32_t>(r);
          if (may_win[r] && is_greedy(replica))
            may_win[r] = flat_lower_bound_s(input_, topology, replica, greedy) < budgets_s[r];
        }
      }
      if (!contains(may_win, true)) continue;
      PlanInput input = input_;
      input.topology = topology;
      const Plan flat =
          in_bags_of(input_, BalancedSolver(std::move(input), effort_).solve_all_flat(may_win, FlatGoal::kStep));
      plan = with_better(std::move(plan), flat, may_win, best);
      set_budgets();
    }
    return plan;
  }

  /// `replicas`: marks those to improve; the others stay greedy.
  Plan solve_all_flat(std::span<const char> replicas, FlatGoal goal) {
    const std::vector<Placement> greedy = greedy_placements(input_, input_.topology);
    placements_ = greedy;
    for (size_t r = 0; r < replicas.size(); ++r) {
      if (replicas[r]) solve(static_cast<int32_t>(r), Objective::kFlat);
    }
    // Bags were compared; ranks may differ by the tokens that do not divide.
    const auto better_of = [&](Plan plan, const Plan& other) {
      const std::vector<ReplicaFigures> before = figures_of(plan), after = figures_of(other);
      std::vector<char> takes(before.size());
      for (size_t r = 0; r < before.size(); ++r) {
        takes[r] = goal == FlatGoal::kEven ? after[r].is_no_worse_than(before[r]) : after[r].is_better_than(before[r]);
      }
      return merged(std::move(plan), other, takes);
    };
    Plan plan = better_of(Plan(input_, "balanced", greedy), finish(greedy));  // closer to home
    return placements_ == greedy ? plan : better_of(std::move(plan), finish(std::move(placements_)));
  }

  PlanInput input_;
  int64_t effort_;
  std::vector<Placement> placements_;
  std::vector<double> bounds_s_;              // of a block in nested bags, by replica
  std::vector<char> is_greedy_;               // by replica: placed by place_greedily
  std::vector<std::vector<int32_t>> starts_;  // by replica: the construction that the last search started from
};

/// Whether larger groups may be of use beside this plan of groups inside nodes: for sequences that those cannot take,
/// or in flat bags, than which nested ones are never worse.
bool needs_larger_groups(const PlanInput& input, const Plan& inside) {
  constexpr double kOfUse = 1 + 1e-3;
  const std::vector<Topology> flats = input.topology.flat_topologies();
  const StepTime time = predict_step(inside);
  for (int32_t replica = 0; replica < inside.topology().num_replicas(); ++replica) {
    const double bound_s = replica_lower_bound_s(input, input.topology, replica);
    if (replica_lower_bound_s(input, inside.topology(), replica) > kOfUse * bound_s) return true;
    const double budget_s = block_budget_s(input, time.replicas[replica].step_s);
    for (const Topology& flat : flats) {
      const bool is_larger = std::ranges::any_of(flat.shapes(), [&](const BagShape& shape) {
        return shape.num_ranks_per_bag() > input.cluster.ranks_per_node;
      });
      if (is_larger && flat_may_take_less(input, flat, replica, budget_s)) return true;
    }
  }
  return false;
}

}  // namespace

Plan plan_balanced(PlanInput input, Effort effort) {
  Topology of_nodes = input.topology.within(input.cluster.ranks_per_node);
  if (of_nodes == input.topology) return BalancedSolver(std::move(input), effort.moves).solve();
  // A search over groups of several nodes finds worse plans, in more time, than one over those of a node: so it is made
  // where it is needed.
  PlanInput smaller = input;
  smaller.topology = std::move(of_nodes);
  const Plan inside = BalancedSolver(std::move(smaller), effort.moves).solve();
  Plan plan = in_bags_of(input, inside);
  if (plan.keeps_limit() && !needs_larger_groups(input, inside)) return plan;
  Plan wide = BalancedSolver(std::move(input), effort.moves).solve();
  if (plan.keeps_limit() != wide.keeps_limit()) return plan.keeps_limit() ? plan : wide;
  return predict_step(plan).total_s() <= predict_step(wide).total_s() ? plan : wide;
}

}  // namespace knapformer
