#include "knapformer/core/balanced_solver.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include "knapformer/core/balanced_fit.h"
#include "knapformer/core/balanced_search.h"
#include "knapformer/core/chunk_cut.h"
#include "knapformer/core/error.h"
#include "knapformer/core/flat_bound.h"
#include "knapformer/core/greedy_solver.h"
#include "knapformer/core/home_assignment.h"
#include "knapformer/core/lower_bound.h"
#include "knapformer/core/planner.h"

namespace knapformer {
namespace {

/// Within this of the lower bound nothing is left to search for.
constexpr double kGoodEnough = 1.0005;
/// At low effort, of the greedy plan of single ranks.
constexpr double kGoodEnoughInTheStep = 1.001;
/// Bags that are this even need no more: tokens that do not divide leave about as much.
constexpr double kEven = 1.00005;

/// Tries targets above the bound: doubling the margin while the placement misses its target, halving it while it meets
/// it. Leaves the best placement in the forest.
class TargetSearch {
 public:
  TargetSearch(BagForest& forest, double bound) : forest_(forest), fit_(forest), bound_(bound) {}

  void run(int32_t num_targets, double first_margin) {
    double low = 0, high = 0;  // margins: missed, met; 0 where none yet
    double margin = first_margin;
    for (int32_t i = 0; i < num_targets; ++i) {
      const double target = bound_ * (1 + margin);
      const double time = fit_.place_all(target, trial_);
      if (time < best_time_) {
        best_time_ = time;
        best_.swap(trial_);
      }
      if (best_time_ <= bound_ * kGoodEnough) break;
      if (time <= target) {
        high = std::min(margin, time / bound_ - 1);
      } else {
        low = margin;
      }
      margin = high == 0 ? 2 * margin : (low + high) / 2;
      if (high > 0 && high - low < 0.0005) break;
    }
  }

  double best_time() const { return best_time_; }
  std::vector<int32_t>& best() { return best_; }

 private:
  BagForest& forest_;
  BalancedFit fit_;
  double bound_;
  double best_time_ = std::numeric_limits<double>::infinity();
  std::vector<int32_t> best_, trial_;
};

/// From the replica's own lengths: what it is planned does not depend on the others.
uint64_t random_key(const PlanInput& input, int32_t replica) {
  const auto [first, last] = input.sequences_of(replica);
  uint64_t key = 0x6B6E6170666F726Du;
  for (int32_t s = first.value; s < last.value; ++s)
    key = (key ^ static_cast<uint64_t>(input.seq_lens[SequenceId(s)])) * 0x9E3779B97F4A7C15u;
  return key;
}

int64_t num_moves(const BagForest& forest, int64_t effort) {
  // In a small instance a move is worth more, and there is time for more of them.
  constexpr int64_t kLeast = 2000, kMost = 100'000, kPerItem = 100;
  // A plan that does not keep the limit of tokens is none: then even low effort searches.
  if (effort >= 0) return forest.keeps_limit() ? effort : std::max(effort, kLeast);
  const auto num_items = static_cast<int64_t>(forest.items().size());
  const int64_t moves = std::clamp(kPerItem * num_items, kLeast, kMost);
  return effort == Effort::kHigh ? 50 * moves : moves;
}

void load(BagForest& forest, const std::vector<int32_t>& node_of_item) {
  forest.clear();
  for (size_t i = 0; i < node_of_item.size(); ++i) forest.add(forest.items()[i], node_of_item[i]);
  forest.update_all();
}

/// Puts the floor of the energy as far below the bound that what remains to be gained is this part of the range.
void set_reference(BagForest& forest, double bound, double time) {
  constexpr double kRangeOverGain = 2, kLeastGain = 1e-3;
  forest.set_reference(time - kRangeOverGain * std::max(time - bound, kLeastGain), time);
}

/// What a replica of a plan is judged by.
struct Figures {
  double time_s = 0;          // predicted
  double max_over_mean = 1;   // work of a rank, over its speed
  int64_t excess_tokens = 0;  // of the fullest rank, beyond what it may hold

  bool keeps_limit() const { return excess_tokens == 0; }
  /// Closer to the limit; or faster, by more than what sums in another order differ in.
  bool is_better_than(const Figures& other) const {
    if (excess_tokens != other.excess_tokens) return excess_tokens < other.excess_tokens;
    return time_s < other.time_s * (1 - 1e-12);
  }
  /// Closer to the limit; or neither slower nor less even.
  bool is_no_worse_than(const Figures& other) const {
    if (excess_tokens != other.excess_tokens) return excess_tokens < other.excess_tokens;
    return time_s <= other.time_s && max_over_mean <= other.max_over_mean;
  }
};

std::vector<Figures> figures_of(const Plan& plan) {
  const PlanInput& input = plan.input();
  const BlockTime time = predict_block_time(plan);
  const auto num_ranks = static_cast<size_t>(plan.topology().num_ranks_per_replica());
  std::vector<Figures> figures(static_cast<size_t>(plan.topology().num_replicas()));
  std::vector<double> work(plan.workload_after().begin(), plan.workload_after().end());
  for (size_t r = 0; r < work.size(); ++r) work[r] /= input.speed_of(Rank(r));
  for (size_t i = 0; i < figures.size(); ++i) {
    figures[i].max_over_mean = LoadBalance::of(std::span(work).subspan(i * num_ranks, num_ranks)).max_over_mean();
  }
  for (size_t r = 0; r < time.ranks.size(); ++r) {
    Figures& f = figures[r / num_ranks];
    f.time_s = std::max(f.time_s, time.group_s[r]);
    if (input.max_tokens_per_rank > 0)
      f.excess_tokens = std::max(f.excess_tokens, plan.tokens_after()[r] - input.max_tokens_per_rank);
  }
  return figures;
}

int32_t replica_of(const Plan& plan, const Placement& place) {
  return place.bag.value / plan.topology().num_bags_per_replica();
}

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
    const bool takes = from_other[static_cast<size_t>(replica_of(plan, plan.placement(id)))] != 0;
    const Plan& source = takes ? other : plan;
    placements.push_back(source.placement(id));
    for (const Chunk& chunk : source.chunks(id)) chunk_lens.push_back(chunk.num_tokens);
  }
  return Plan(plan.input(), plan.solver(), std::move(placements), std::move(chunk_lens));
}

std::vector<int64_t> chunk_lens_of(const Plan& plan) {
  std::vector<int64_t> lens;
  lens.reserve(plan.chunks().size());
  for (const Chunk& chunk : plan.chunks()) lens.push_back(chunk.num_tokens);
  return lens;
}

std::vector<int32_t> nodes_of(const BagForest& forest, const std::vector<Placement>& placements) {
  std::vector<int32_t> nodes;
  nodes.reserve(forest.items().size());
  for (const ForestItem& item : forest.items()) nodes.push_back(forest.node_of(placements[item.id.index()]));
  return nodes;
}

}  // namespace

BalancedSolver::BalancedSolver(PlanInput input, int64_t effort) : input_(std::move(input)), effort_(effort) {
  placements_.resize(static_cast<size_t>(input_.seq_lens.num_sequences()));
  bounds_s_.resize(static_cast<size_t>(input_.topology.num_replicas()));
  is_greedy_.resize(bounds_s_.size());
}

void BalancedSolver::search(BagForest& forest, std::vector<int32_t>& node_of_item, int32_t replica,
                            const SearchRange& range) const {
  if (effort_ != Effort::kHigh) return improve_in_rounds(forest, node_of_item, replica, range, effort_);
  const std::vector<int32_t> start = node_of_item;
  improve_in_rounds(forest, node_of_item, replica, range, Effort::kDefault);
  SearchRange from_here = range;
  from_here.time = forest.slowest();
  if (range.high_goes_on) return improve_in_rounds(forest, node_of_item, replica, from_here, Effort::kHigh);
  std::vector<int32_t> other = start;
  load(forest, other);
  improve_in_rounds(forest, other, replica, range, Effort::kHigh);
  if (forest.slowest() < from_here.time) {
    node_of_item.swap(other);
  } else {
    load(forest, node_of_item);
  }
}

void BalancedSolver::improve_in_rounds(BagForest& forest, std::vector<int32_t>& node_of_item, int32_t replica,
                                       const SearchRange& range, int64_t effort) const {
  constexpr uint64_t kMostRounds = 4;
  double time = range.time;
  for (uint64_t round = 0; round < kMostRounds; ++round) {
    const double before = time;
    const int64_t moves = num_moves(forest, effort);
    if (moves == 0 || before <= range.good_enough) return;
    set_reference(forest, range.least, before);
    improve(forest, node_of_item,
            {.num_moves = moves,
             .key = random_key(input_, replica) + (round << 32),
             .good_enough = range.good_enough,
             .first_temperature = range.first_temperature,
             .last_temperature = range.last_temperature});
    time = forest.slowest();
    if (time > (before + range.least) / 2) return;
  }
}

void BalancedSolver::place_greedily() {
  const Topology smallest = input_.topology.flat_topologies().front();
  const bool is_whole = smallest.shapes().size() == 1 && smallest.shapes().front().num_ranks_per_bag() == 1;
  if (!is_whole || input_.max_tokens_per_rank > 0) return;
  const auto is_good = [&](size_t r, double time_s) { return time_s <= bounds_s_[r] * kGoodEnoughInTheStep; };
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

void BalancedSolver::solve(int32_t replica, Objective objective) {
  BagForest forest(input_, replica, objective);
  if (forest.items().empty()) return;
  const auto place_all = [&] {
    return objective == Objective::kTime ? placed_nested(forest, replica) : placed_flat(forest, replica);
  };
  std::vector<int32_t> node_of_item = place_all();
  if (input_.max_tokens_per_rank > 0) {
    // A limit that is kept anyway costs nothing.
    forest.set_token_limit(input_.max_tokens_per_rank);
    if (!forest.keeps_limit()) node_of_item = place_all();
  }
  for (size_t i = 0; i < node_of_item.size(); ++i)
    placements_[forest.items()[i].id.index()] = forest.placement(node_of_item[i]);
}

std::vector<int32_t> BalancedSolver::placed_nested(BagForest& forest, int32_t replica) const {
  const double bound = std::max(1.0, bounds_s_[static_cast<size_t>(replica)] / forest.unit_s());
  constexpr size_t kFewSequences = 512;  // then there is time to try more
  const int32_t few_targets = forest.items().size() <= kFewSequences ? 4 : 2;
  TargetSearch targets(forest, bound);
  // Where even the longest sequence is little of a rank's share, nothing needs sharing, and the first target is met
  // close to the bound.
  const bool needs_sharing = forest.cost(forest.items().front(), forest.num_nodes() - 1) > 0.5;
  targets.run(effort_ == Effort::kLow ? few_targets : 10, needs_sharing ? 0.02 : 0.0004);
  SearchRange range{.least = bound,
                    .good_enough = bound * kGoodEnough,
                    .high_goes_on = true,
                    .first_temperature = 1.0,
                    .last_temperature = 0.03};
  const auto time_from = [&](std::vector<int32_t>& placement) {
    load(forest, placement);
    range.time = forest.slowest();
    search(forest, placement, replica, range);
    return forest.slowest();
  };
  const double time = time_from(targets.best());
  if (std::isfinite(forest.node(0).token_capacity) && time > range.good_enough) {
    // Everything shared by as many ranks as may is the most even in tokens. From there it is a long way.
    std::vector<int32_t> spread;
    BalancedFit(forest).place_all(0, spread);
    range.first_temperature = 32;
    if (time_from(spread) < time) {
      targets.best().swap(spread);
    } else {
      load(forest, targets.best());
    }
  }
  return std::move(targets.best());
}

std::vector<int32_t> BalancedSolver::placed_flat(BagForest& forest, int32_t replica) const {
  std::vector<int32_t> nodes = nodes_of(forest, placements_);  // greedy
  load(forest, nodes);
  if (num_moves(forest, effort_) == 0) return nodes;
  // Tokens that do not divide make ranks of a bag differ by one, which the forest does not see.
  double mean_time = 0, time_of_a_token = 0;
  int32_t num_ranks = 0;
  for (int32_t bag = 0; bag < forest.num_bags(); ++bag) {
    const BagForest::Node& node = forest.node(forest.root(bag));
    mean_time += forest.time_with_exchange(bag) * node.degree;
    num_ranks += node.degree;
    time_of_a_token = std::max(time_of_a_token, node.time_per_token * node.degree + node.exchange_per_token);
  }
  mean_time /= num_ranks;
  const auto search_for = [&](const BagForest::FlatGoal& goal, double least) {
    forest.set_flat_goal({.of_time = goal.of_time});
    const double time = forest.slowest();  // without what is beyond a limit
    forest.set_flat_goal(goal);
    search(forest, nodes, replica,
           {.least = least, .time = time, .good_enough = least * kEven, .last_temperature = 1e-6});
  };
  if (!forest.keeps_limit()) search_for({}, 1);
  forest.set_flat_goal({});
  const double greedy_work = forest.slowest(), greedy_time = forest.slowest_with_exchange() - time_of_a_token;
  if (input_.topology.shapes().size() == 1) {
    // What is exchanged in all is the same however the bags are filled, so even work is nearly all there is to gain:
    // that first, without taking longer than greedy. Then the time, with the work as even.
    search_for({.of_time = false, .most_time = greedy_time}, 1);
    forest.set_flat_goal({});
    search_for({.of_time = true, .most_work = std::max(forest.slowest(), kEven)}, mean_time);
  } else {
    // Small bags exchange less. First the time, with the work no less even than greedy's; then the work.
    search_for({.of_time = true, .most_work = greedy_work}, 1);
    search_for({.of_time = false, .most_time = forest.slowest_with_exchange()}, 1);
  }
  return nodes;
}

Plan BalancedSolver::finish(std::vector<Placement> placements) const {
  assign_homes(input_, placements);
  if (input_.topology.is_flat() && input_.rank_speed.empty()) return Plan(input_, "balanced", std::move(placements));
  std::vector<int64_t> chunk_lens = cut_chunks(input_, placements);
  return Plan(input_, "balanced", std::move(placements), std::move(chunk_lens));
}

Plan BalancedSolver::with_flat_replicas(Plan plan) const {
  std::vector<Figures> best = figures_of(plan);
  std::vector<char> may_win(best.size()), wins(best.size());
  const std::vector<Topology> flats = input_.topology.flat_topologies();
  // Then a flat plan is greedy's; a limit of tokens may have it search.
  const bool is_greedy = effort_ == Effort::kLow && input_.max_tokens_per_rank == 0;
  for (const Topology& topology : flats) {
    const bool is_smallest = &topology == &flats.front();
    const auto may_be_below = [&](int32_t replica, double time_s) {
      return is_greedy ? replica_lower_bound_s(input_, topology, replica) < time_s
                       : flat_may_take_less(input_, topology, replica, time_s);
    };
    for (size_t r = 0; r < best.size(); ++r) {
      may_win[r] = !(is_smallest && is_greedy_[r]) &&
                   (!best[r].keeps_limit() || may_be_below(static_cast<int32_t>(r), best[r].time_s));
    }
    if (is_greedy && contains(may_win, true)) {
      const std::vector<Placement> greedy = greedy_placements(input_, topology);
      for (size_t r = 0; r < best.size(); ++r) {
        may_win[r] =
            may_win[r] && flat_lower_bound_s(input_, topology, static_cast<int32_t>(r), greedy) < best[r].time_s;
      }
    }
    if (!contains(may_win, true)) continue;
    PlanInput input = input_;
    input.topology = topology;
    const Plan flat = in_nested_bags(BalancedSolver(std::move(input), effort_).solve_all_flat(may_win));
    const std::vector<Figures> figures = figures_of(flat);
    for (size_t r = 0; r < best.size(); ++r) {
      wins[r] = may_win[r] && figures[r].is_better_than(best[r]);
      if (wins[r]) best[r] = figures[r];
    }
    plan = merged(std::move(plan), flat, wins);
  }
  return plan;
}

Plan BalancedSolver::in_nested_bags(const Plan& flat) const {
  std::vector<Placement> placements(flat.placements().begin(), flat.placements().end());
  for (Placement& place : placements) place.bag = input_.topology.bag_of(place.first_rank);
  return Plan(input_, "balanced", std::move(placements), chunk_lens_of(flat));
}

Plan BalancedSolver::solve() {
  if (input_.topology.is_flat()) return solve_all_flat(std::vector<char>(bounds_s_.size(), 1));
  for (size_t r = 0; r < bounds_s_.size(); ++r)
    bounds_s_[r] = replica_lower_bound_s(input_, input_.topology, static_cast<int32_t>(r));
  if (effort_ == Effort::kLow) place_greedily();
  for (size_t r = 0; r < bounds_s_.size(); ++r) {
    if (!is_greedy_[r]) solve(static_cast<int32_t>(r), Objective::kTime);
  }
  return with_flat_replicas(finish(std::move(placements_)));
}

Plan BalancedSolver::solve_all_flat(std::span<const char> replicas) {
  const std::vector<Placement> greedy = greedy_placements(input_, input_.topology);
  placements_ = greedy;
  for (size_t r = 0; r < replicas.size(); ++r) {
    if (replicas[r]) solve(static_cast<int32_t>(r), Objective::kFlat);
  }
  // Bags were compared; ranks may differ by the tokens that do not divide.
  const auto no_worse_of = [](Plan plan, const Plan& other) {
    const std::vector<Figures> before = figures_of(plan), after = figures_of(other);
    std::vector<char> takes(before.size());
    for (size_t r = 0; r < before.size(); ++r) takes[r] = after[r].is_no_worse_than(before[r]);
    return merged(std::move(plan), other, takes);
  };
  Plan plan = no_worse_of(Plan(input_, "balanced", greedy), finish(greedy));  // closer to home
  return placements_ == greedy ? plan : no_worse_of(std::move(plan), finish(std::move(placements_)));
}

}  // namespace knapformer
