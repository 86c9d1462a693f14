#include "knapformer/core/balanced_solver.h"

#include <algorithm>
#include <limits>
#include <string>

#include "knapformer/core/balanced_fit.h"
#include "knapformer/core/balanced_search.h"
#include "knapformer/core/chunk_cut.h"
#include "knapformer/core/error.h"
#include "knapformer/core/greedy_solver.h"
#include "knapformer/core/home_assignment.h"
#include "knapformer/core/lower_bound.h"
#include "knapformer/core/planner.h"

namespace knapformer {
namespace {

/// Within this of the lower bound nothing is left to search for.
constexpr double kGoodEnough = 1.0005;
/// Bags whose work is this even need no more: tokens that do not divide leave about as much.
constexpr double kEvenWork = 1.0001;

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
      (time <= target ? high : low) = margin;
      if (time <= target) high = std::min(margin, time / bound_ - 1);
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

bool keeps_limit(const Plan& plan) {
  const int64_t limit = plan.input().max_tokens_per_rank;
  return limit == 0 || plan.max_tokens() <= limit;
}

std::vector<int32_t> nodes_of(const BagForest& forest, const std::vector<Placement>& placements) {
  std::vector<int32_t> nodes;
  nodes.reserve(forest.items().size());
  for (const ForestItem& item : forest.items()) nodes.push_back(forest.node_of(placements[item.id.index()]));
  return nodes;
}

}  // namespace

BalancedSolver::BalancedSolver(PlanInput input, int64_t effort) : input_(std::move(input)), effort_(effort) {
  key_ = 0x6B6E6170666F726Du;
  for (const int64_t length : input_.seq_lens.lens())
    key_ = (key_ ^ static_cast<uint64_t>(length)) * 0x9E3779B97F4A7C15u;
  placements_.resize(static_cast<size_t>(input_.seq_lens.num_sequences()));
}

int64_t BalancedSolver::num_moves(size_t num_items) const {
  if (effort_ >= 0) return effort_;
  // In a small instance a move is worth more, and there is time for more of them.
  constexpr int64_t kLeast = 2000, kMost = 100'000, kPerItem = 100;
  const int64_t moves = std::clamp(kPerItem * static_cast<int64_t>(num_items), kLeast, kMost);
  return effort_ == Effort::kHigh ? 50 * moves : moves;
}

void BalancedSolver::keep(const BagForest& forest, const std::vector<int32_t>& node_of_item) {
  for (size_t i = 0; i < node_of_item.size(); ++i)
    placements_[forest.items()[i].id.index()] = forest.placement(node_of_item[i]);
}

void BalancedSolver::solve_nested(int32_t replica) {
  BagForest forest(input_, replica, Objective::kTime);
  if (forest.items().empty()) return;
  const double bound_s = replica_lower_bound_s(input_, replica);
  bound_s_ = std::max(bound_s_, bound_s);
  const double bound = std::max(1.0, bound_s / forest.unit_s());
  const bool small = forest.items().size() <= 512;
  const bool searches = num_moves(forest.items().size()) > 0;
  TargetSearch targets(forest, bound);
  targets.run(searches ? 10 : small ? 4 : 2, 0.02);
  load(forest, targets.best());
  if (searches && targets.best_time() > bound * kGoodEnough) {
    set_reference(forest, bound, targets.best_time());
    improve(forest, targets.best(),
            {.num_moves = num_moves(forest.items().size()),
             .key = key_ + static_cast<uint64_t>(replica),
             .good_enough = bound * kGoodEnough,
             .first_temperature = 1,
             .last_temperature = 0.03});
  }
  keep(forest, targets.best());
}

void BalancedSolver::solve_flat(int32_t replica) {
  BagForest forest(input_, replica, Objective::kWork);
  if (forest.items().empty()) return;
  std::vector<int32_t> nodes = nodes_of(forest, placements_);  // greedy
  load(forest, nodes);
  double best_work = forest.slowest();
  const double greedy_time = forest.slowest_with_exchange();
  const int64_t moves = num_moves(forest.items().size());
  // First without taking longer than greedy at all; then a little longer, then a little more. Where nothing is
  // exchanged time is work.
  const bool exchanges = greedy_time > best_work;
  for (const double longer : {0.0, 0.0005, 0.002}) {
    if (best_work <= kEvenWork || moves == 0 || (longer > 0 && !exchanges)) return;
    std::vector<int32_t> trial = nodes;
    const double time_limit = greedy_time * (1 + longer);
    forest.set_time_limit(time_limit);
    load(forest, trial);
    set_reference(forest, 1.0, best_work);
    improve(forest, trial,
            {.num_moves = moves,
             .key = key_ + static_cast<uint64_t>(replica),
             .good_enough = kEvenWork,
             .first_temperature = 0.1,
             .last_temperature = 1e-6});
    forest.set_time_limit(std::numeric_limits<double>::infinity());
    forest.update_all();
    const double work = forest.slowest();
    constexpr double kRounding = 1e-9;
    if (work >= best_work || forest.slowest_with_exchange() > time_limit * (1 + kRounding)) continue;
    best_work = work;
    nodes.swap(trial);
    keep(forest, nodes);
  }
}

Plan BalancedSolver::finish(std::vector<Placement> placements) const {
  assign_homes(input_, placements);
  if (input_.topology.is_flat() && input_.rank_speed.empty()) return Plan(input_, "balanced", std::move(placements));
  std::vector<int64_t> chunk_lens = cut_chunks(input_, placements);
  return Plan(input_, "balanced", std::move(placements), std::move(chunk_lens));
}

std::optional<Plan> BalancedSolver::best_flat_below(const Plan& plan) const {
  const Topology& topology = input_.topology;
  double time_s = plan.predicted_time_s();
  std::optional<Plan> best;
  // Who plans in the step has no time to look for the last two-thousandth.
  if (effort_ == Effort::kLow && keeps_limit(plan) && time_s <= kGoodEnough * bound_s_) return best;
  // Of bags of several shapes only the whole bags make a flat topology with the same ranks in them.
  std::vector<std::string> flats;
  if (topology.shapes().size() == 1) {
    const int32_t num_ranks = topology.num_ranks_per_replica();
    for (const int32_t degree : topology.shapes().front().degrees) {
      const bool may_be_better = flat_bound_s(degree) < time_s;
      if (may_be_better) flats.push_back(text('g', degree, 'n', num_ranks / degree));
    }
  } else {
    std::string flat;
    for (const BagShape& s : topology.shapes())
      flat += text(flat.empty() ? "" : "+", 'g', s.num_ranks_per_bag(), 'n', s.num_bags);
    flats.push_back(flat);
  }
  const auto consider = [&](Plan candidate) {
    const double candidate_s = candidate.predicted_time_s();
    if (keeps_limit(candidate) && (candidate_s < time_s || !keeps_limit(best ? *best : plan))) {
      time_s = candidate_s;
      best = std::move(candidate);
    }
    return candidate_s;
  };
  for (const std::string& name : flats) {
    const Topology flat = Topology::parse(name, topology.num_ranks());
    const double greedy_s = consider(in_nested_bags(greedy_placements(input_, flat), {}));
    // Close enough that it may win once improved as well.
    constexpr double kClose = 1.02;
    if (effort_ == Effort::kLow || greedy_s > kClose * time_s) continue;
    PlanInput input = input_;
    input.topology = flat;
    const Plan improved = BalancedSolver(std::move(input), effort_).solve();
    std::vector<int64_t> chunk_lens;
    for (const Chunk& chunk : improved.chunks()) chunk_lens.push_back(chunk.num_tokens);
    consider(in_nested_bags({improved.placements().begin(), improved.placements().end()}, std::move(chunk_lens)));
  }
  return best;
}

Plan BalancedSolver::in_nested_bags(std::vector<Placement> placements, std::vector<int64_t> chunk_lens) const {
  for (Placement& place : placements) place.bag = input_.topology.bag_of(place.first_rank);
  if (chunk_lens.empty()) return Plan(input_, "balanced", std::move(placements));
  return Plan(input_, "balanced", std::move(placements), std::move(chunk_lens));
}

double BalancedSolver::flat_bound_s(int32_t degree) const {
  double work_s = 0, longest_s = 0, tokens = 0;
  for (int32_t s = 0; s < input_.seq_lens.num_sequences(); ++s) {
    const double sequence_s = input_.work(SequenceId(s)) / input_.cluster.flops_per_s;
    work_s += sequence_s;
    longest_s = std::max(longest_s, sequence_s);
    tokens += static_cast<double>(input_.seq_lens[SequenceId(s)]);
  }
  if (!input_.rank_speed.empty()) return 0;
  const double exchange_s = input_.cluster.exchange_s_per_token(Rank(0), degree, input_.d_model);
  return std::max((work_s + exchange_s * tokens) / input_.topology.num_ranks(), longest_s / degree);
}

Plan BalancedSolver::solve() {
  if (input_.topology.is_flat()) return solve_all_flat();
  for (int32_t replica = 0; replica < input_.topology.num_replicas(); ++replica) solve_nested(replica);
  Plan plan = finish(std::move(placements_));
  std::optional<Plan> better = best_flat_below(plan);
  return better ? std::move(*better) : std::move(plan);
}

Plan BalancedSolver::solve_all_flat() {
  std::vector<Placement> greedy = greedy_placements(input_, input_.topology);
  placements_ = greedy;
  for (int32_t replica = 0; replica < input_.topology.num_replicas(); ++replica) solve_flat(replica);
  if (placements_ == greedy) return Plan(input_, "balanced", std::move(greedy));
  Plan plan = finish(std::move(placements_));
  // Bags were compared; ranks may differ by the tokens that do not divide.
  Plan published(input_, "balanced", std::move(greedy));
  const bool is_better =
      plan.balance_after().max <= published.balance_after().max && keeps_limit(plan) >= keeps_limit(published);
  return is_better ? std::move(plan) : std::move(published);
}

}  // namespace knapformer
