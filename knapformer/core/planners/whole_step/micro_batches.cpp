#include "knapformer/core/planners/whole_step/micro_batches.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>

#include "knapformer/core/cost/accumulation.h"
#include "knapformer/core/cost/bounds.h"
#include "knapformer/core/cost/step_time.h"
#include "knapformer/core/planners/balanced/locality.h"
#include "knapformer/core/planners/balanced/uneven_chunks.h"
#include "knapformer/core/planners/planner.h"
#include "knapformer/core/planners/topology_choice.h"
#include "knapformer/core/planners/whole_step/fit_by_tokens.h"
#include "knapformer/core/planners/whole_step/micro_batch_packing.h"
#include "knapformer/core/util/error.h"

namespace knapformer {
namespace {

constexpr double kGoodEnoughShared = 1.0001;   // like Effort::kGoodEnough, if sequences are shared
constexpr double kHopelessAtLowEffort = 1.01;  // above this, few swaps do not help
/// With many sequences or low effort, a packed micro-batch this far above its bound is planned anew.
constexpr double kTooFar = 0.005;
/// Higher levels hold more tokens: they must be faster by this factor.
constexpr double kWorthMemory = 1 - 5e-5;
/// A step within this of its bound is not packed with even levels.
constexpr double kNearEnough = 1.01;
constexpr int32_t kManyKicks = 1000;  // the number of trials ends the search first
/// Packed micro-batches that are this close together are not planned anew.
constexpr double kWellPacked = 1.0004;
/// Shorter by more than the rounding of sums in another order.
constexpr double kShorter = 1 - 1e-12;

/// The step's sequences as if they were one micro-batch's.
PlanInput all_at_once(const StepInput& input) {
  PlanInput all = input.sequences;
  const int64_t max = std::numeric_limits<int64_t>::max() / input.num_micro_batches;
  all.max_tokens_per_rank = std::min(all.max_tokens_per_rank, max) * input.num_micro_batches;
  return all;
}

class StepSolver {
 public:
  /// `blocks_bound_s`: from blocks_lower_bound_s.
  StepSolver(StepInput input, std::string_view solver, Effort effort, double blocks_bound_s)
      : input_(std::move(input)),
        solver_(solver),
        effort_(effort),
        blocks_bound_s_(blocks_bound_s),
        bound_s_(lower_bound_s(input_, blocks_bound_s_)) {}

  StepPlan solve() {
    consider_packing();
    consider_spread();
    consider_given_order();
    if (!best_) consider_fit();
    if (!best_) refuse();
    return std::move(*best_);
  }

 private:
  bool is_low() const { return effort_.moves == Effort::kLow; }
  /// Few enough sequences to try much.
  bool has_few() const {
    constexpr int32_t kFew = 4096;
    return input_.sequences.seq_lens.num_sequences() <= kFew;
  }
  bool may_search() const { return !is_low() && has_few(); }
  /// The effort of a micro-batch's planner.
  Effort planners_effort() const { return has_few() ? effort_ : Effort{.moves = Effort::kLow}; }
  double fixed_s() const { return input_.num_micro_batches * input_.sequences.cluster.fixed_s; }
  double good_enough(bool shares) const {
    return is_low() ? Effort::kGoodEnoughAtLowEffort : shares ? kGoodEnoughShared : Effort::kGoodEnough;
  }

  struct Packed {
    std::vector<PackedSequence> sequences;
    std::vector<char> is_whole;  // by micro-batch
    std::vector<double> levels_s;
    double time_s = 0;         // as packed, shared sequences included
    double levels_time_s = 0;  // if every micro-batch took its level

    bool is_within(double factor) const { return time_s <= levels_time_s * factor; }
    int32_t num_used() const {
      std::vector<char> is_used(is_whole.size(), 0);
      for (const PackedSequence& sequence : sequences) is_used[sequence.micro_batch] = 1;
      return static_cast<int32_t>(std::ranges::count(is_used, 1));
    }
    bool shares() const {
      return std::ranges::any_of(is_whole, [](char whole) { return whole == 0; });
    }
  };

  void consider(StepPlan plan) {
    const double time_s = predict_accumulated(plan).total_s;
    if (best_ && time_s >= best_s_ * kShorter) return;
    best_s_ = time_s;
    best_ = std::move(plan);
  }

  std::vector<PackingShape> shapes() const {
    const int32_t used = input_.num_micro_batches;
    // The ranks' sums are balanced, as if all micro-batches were one.
    if (input_.sync == StepSync::kStep) return {{.used = 1, .stepped = 0}};
    std::vector<PackingShape> out;
    for (int32_t u = used; u >= 1; u /= 2) {
      const int32_t increment = is_low() ? u : std::max(1, u / 2);
      for (int32_t stepped = 0; stepped < u; stepped += increment) out.push_back({.used = u, .stepped = stepped});
    }
    return out;
  }

  /// Swaps that each packing tries.
  int64_t num_trials() const {
    constexpr int64_t kMin = 150'000, kMax = 40'000'000;
    const auto num_sequences = int64_t{input_.sequences.seq_lens.num_sequences()};
    if (is_low()) return std::max(kMin, 64 * num_sequences);
    return std::clamp(400 * num_sequences, kMin, kMax);
  }

  /// Swaps that are then tried on the best packing, if none is good enough.
  int64_t num_last_trials() const {
    constexpr int64_t kMost = 8'000'000, kPerSequence = 40'000;
    return std::min(kMost, kPerSequence * input_.sequences.seq_lens.num_sequences());
  }

  std::optional<Packed> pack() const {
    const PlanInput& step = input_.sequences;
    const int32_t num_packed = input_.sync == StepSync::kStep ? 1 : input_.num_micro_batches;
    MicroBatchPacking packing(input_.sync == StepSync::kStep ? all_at_once(input_) : step, blocks_bound_s_);
    std::optional<Packed> best;
    std::vector<std::vector<double>> tried;
    // Keeps the packing if it is the best. Returns whether it is then as good as its levels allow.
    const auto keep = [&](const std::vector<double>& levels_s, const std::vector<double>& times_s) {
      const double time_s = accumulated_s(input_, times_s) * (1 + packing.overflow());
      if (!std::isfinite(time_s) || (best && time_s >= best->time_s * kWorthMemory)) return false;
      best = Packed{.sequences = packing.sequences(),
                    .is_whole = packing.is_whole(),
                    .levels_s = levels_s,
                    .time_s = time_s,
                    .levels_time_s = accumulated_s(input_, levels_s)};
      return best->is_within(good_enough(best->shares()));
    };
    const auto goal_s = [&] { return blocks_bound_s_ * good_enough(packing.shares()); };
    for (const PackingShape& shape : shapes()) {
      const std::vector<double> levels_s = packing.levels_s(shape, num_packed);
      // The FSDP time that is not hidden depends on the levels. Apart from that, all packings that reach their levels
      // are equally good.
      if (best) {
        const bool is_reached = best->is_within(good_enough(best->shares()));
        const double to_beat_s = is_reached ? best->levels_time_s : best->time_s;
        if (accumulated_s(input_, levels_s) >= to_beat_s * kWorthMemory) continue;
      }
      if (std::ranges::find(tried, levels_s) != tried.end()) continue;
      tried.push_back(levels_s);
      const std::vector<double> times_s = packing.pack(levels_s);
      if (keep(levels_s, times_s)) continue;
      const double sum_s = std::accumulate(times_s.begin(), times_s.end(), 0.0);
      if (is_low() && sum_s > blocks_bound_s_ * kHopelessAtLowEffort) continue;
      keep(levels_s,
           packing.refine(
               {.num_trials = num_trials(), .good_enough_s = goal_s(), .num_kicks = may_search() ? kManyKicks : 0}));
    }
    if (may_search() && best && !best->is_within(good_enough(best->shares()) * (2 - kWorthMemory))) {
      const std::vector<double> levels_s = best->levels_s;
      packing.pack(levels_s);
      keep(levels_s,
           packing.refine({.num_trials = num_last_trials(), .good_enough_s = goal_s(), .num_kicks = kManyKicks}));
    }
    return best;
  }

  void consider_packing() {
    if (blocks_bound_s_ <= 0) return;
    const std::optional<Packed> packed = pack();
    if (!packed) return;
    const double well = std::max(good_enough(false), kWellPacked);
    is_packed_well_ = !packed->shares() && packed->is_within(well);
    is_near_bound_ = !packed->shares() && packed->time_s + fixed_s() <= bound_s_ * well;
    allowance_s_ = blocks_bound_s_ * (may_search() ? kWellPacked - 1 : kTooFar) / packed->num_used();
    if (input_.sync == StepSync::kStep) return consider_sums(*packed);
    consider_packed(packed->sequences);
  }

  void consider_packed(std::span<const PackedSequence> packed) {
    std::vector<int32_t> micro_batches;
    for (const PackedSequence& sequence : packed) micro_batches.push_back(sequence.micro_batch);
    consider_plans(std::move(micro_batches), packed);
  }

  /// The levels of the packing above differ, and all sequences that must be shared lie in one micro-batch: that leaves
  /// the others little to hide FSDP behind. So packings with even levels are considered, with sequences that no level
  /// holds shared in any micro-batch.
  void consider_spread() {
    if (blocks_bound_s_ <= 0 || input_.sync == StepSync::kStep || is_within(kNearEnough)) return;
    if (is_low() && !has_few()) return;
    const int32_t least = input_.num_micro_batches / 4;  // fewer leave too much of FSDP exposed
    for (int32_t used = input_.num_micro_batches; used > 1 && used >= least; used /= 2) {
      std::vector<double> levels_s(static_cast<size_t>(input_.num_micro_batches), 0.0);
      std::fill_n(levels_s.begin(), used, blocks_bound_s_ / used);
      if (best_ && accumulated_s(input_, levels_s) + fixed_s() >= best_s_ * kWorthMemory) continue;
      MicroBatchPacking packing(input_.sequences, levels_s.front(), Sharing::kSpread);
      std::vector<double> times_s = packing.pack(levels_s);
      if (!std::isfinite(packing.overflow())) continue;
      if (!is_low())
        times_s = packing.refine({.num_trials = num_trials(), .good_enough_s = blocks_bound_s_ * good_enough(false)});
      if (best_ && accumulated_s(input_, times_s) + fixed_s() >= best_s_) continue;
      is_packed_well_ = false;
      consider_packed(packing.sequences());
    }
  }

  /// Plans the micro-batches: as packed if that is good enough, else by the planner if that is better. `packed`: empty
  /// if nothing is.
  void consider_plans(std::vector<int32_t> micro_batches, std::span<const PackedSequence> packed) {
    std::vector<PlanInput> inputs = micro_batch_inputs(input_, micro_batches);
    std::vector<std::vector<Placement>> placements(inputs.size());
    for (size_t s = 0; s < packed.size(); ++s) placements[micro_batches[s]].push_back(packed[s].placement);
    std::vector<Plan> plans;
    for (size_t k = 0; k < inputs.size(); ++k) {
      std::optional<Plan> plan;
      if (!packed.empty()) plan = plan_of(inputs[k], std::move(placements[k]));
      plan = better_of(std::move(plan), inputs[k]);
      if (!plan) return;
      plans.push_back(std::move(*plan));
    }
    consider(StepPlan(input_, std::move(micro_batches), std::move(plans)));
  }

  /// The packed plan, or nothing if a rank holds too many tokens after all.
  std::optional<Plan> plan_of(const PlanInput& input, std::vector<Placement> placements) const {
    bring_home(input, placements);
    const bool shares = std::ranges::any_of(placements, [](const Placement& place) { return place.degree > 1; });
    const int64_t limit = input.max_tokens_per_rank;
    if (!shares || input.topology.is_flat()) {
      Plan even(input, "packed", placements);
      if (limit == 0 || even.max_tokens() <= limit) return even;
      if (!shares) return std::nullopt;
    }
    Plan plan(input, "packed", placements, uneven_chunk_lens(input, placements));
    if (limit > 0 && plan.max_tokens() > limit) return std::nullopt;
    return plan;
  }

  bool is_good(const Plan& plan) const {
    if (is_packed_well_) return true;
    const StepTime time = predict_step(plan);
    const PlanInput& input = plan.input();
    for (int32_t r = 0; r < input.topology.num_replicas(); ++r) {
      if (time.replicas[r].block_s > replica_lower_bound_s(input, input.topology, r) + allowance_s_) return false;
    }
    return true;
  }

  /// `plan`, or the planner's plan if `plan` is not good enough and the planner's is better. Nothing if neither keeps
  /// the limit of tokens.
  std::optional<Plan> better_of(std::optional<Plan> plan, const PlanInput& input) const {
    if (plan && is_good(*plan)) return plan;
    std::optional<Plan> other = plan_within_limit(input, solver_, planners_effort());
    if (other && (!plan || predict_step(*other).total_s() < predict_step(*plan).total_s())) plan = std::move(other);
    return plan;
  }

  [[noreturn]] void refuse() const {
    const PlanInput& step = input_.sequences;
    throw_argument<TokenLimitError>(
        "max_tokens_per_rank", step.max_tokens_per_rank,
        text("a limit that solver '", solver_, "' keeps with topology ", step.topology.str(), " and ",
             input_.num_micro_batches,
             " micro-batches; with more of them, or in bags of more ranks, less may be possible"));
  }

  void consider_sums(const Packed& packed);
  /// Considers the plan of all sequences, cut into these micro-batches, if that keeps the limit of tokens.
  void consider_cut(const Plan& sums, std::vector<int32_t> micro_batches);

  void consider_given_order() {
    if (best_ && !has_few() && is_near_bound_) return;
    const std::vector<int32_t> micro_batches =
        micro_batches_as_given(input_.sequences.seq_lens, input_.num_micro_batches);
    const std::vector<PlanInput> inputs = micro_batch_inputs(input_, micro_batches);
    std::vector<Plan> plans;
    for (const PlanInput& input : inputs) {
      std::optional<Plan> plan = plan_within_limit(input, solver_, planners_effort());
      if (!plan) return;
      plans.push_back(*std::move(plan));
    }
    consider(StepPlan(input_, micro_batches, std::move(plans)));
  }

  /// Route aside, which no packing avoids and the bound leaves out.
  bool is_within(double factor) const {
    if (!best_) return false;
    double packed_s = best_s_;
    for (const Plan& plan : best_->plans()) packed_s -= predict_step(plan).route_s;
    return packed_s <= bound_s_ * factor;
  }

  /// The last resort for a limit of tokens: the packing by tokens alone, each micro-batch planned anew.
  void consider_fit() {
    is_packed_well_ = false;
    for (const FitInto into : {FitInto::kSmallest, FitInto::kBags}) {
      if (const auto fit = fit_by_tokens(input_, into)) consider_packed(*fit);
      if (best_) return;
    }
  }

  StepInput input_;
  std::string_view solver_;
  Effort effort_;
  double blocks_bound_s_, bound_s_;
  std::optional<StepPlan> best_;
  double best_s_ = 0;
  bool is_packed_well_ = false;  // as well as its levels allow
  bool is_near_bound_ = false;
  double allowance_s_ = 0;
};

/// All sequences are placed as if there were one micro-batch, so that the ranks' sums are even. Then each rank's
/// sequences are cut into micro-batches of about equally many tokens. Shared sequences come first, since their ranks
/// must all have them in the same micro-batch; so most ranks that wait for each other meet in the first micro-batch,
/// where no rank is late.
void StepSolver::consider_sums(const Packed& packed) {
  const PlanInput all = all_at_once(input_);
  std::vector<Placement> packed_placements;
  for (const PackedSequence& sequence : packed.sequences) packed_placements.push_back(sequence.placement);
  const std::optional<Plan> sums = better_of(plan_of(all, std::move(packed_placements)), all);
  if (!sums) return;
  const SequenceLengths& seq_lens = input_.sequences.seq_lens;
  const auto num_ranks = static_cast<size_t>(seq_lens.num_ranks());
  std::vector<int32_t> order(static_cast<size_t>(seq_lens.num_sequences()));
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, [&](int32_t a, int32_t b) {
    const int32_t degrees[] = {sums->placement(SequenceId(a)).degree, sums->placement(SequenceId(b)).degree};
    if (degrees[0] != degrees[1]) return degrees[0] > degrees[1];
    return seq_lens[SequenceId(a)] > seq_lens[SequenceId(b)];
  });
  const auto num_micro_batches = static_cast<size_t>(input_.num_micro_batches);
  std::vector<int64_t> tokens(num_ranks * num_micro_batches);  // [micro-batch][rank]
  std::vector<int32_t> micro_batches(order.size());
  for (const int32_t s : order) {
    const auto chunks = sums->chunks(SequenceId(s));
    size_t best = 0;
    int64_t min_tokens = std::numeric_limits<int64_t>::max();
    for (size_t k = 0; k < num_micro_batches; ++k) {
      int64_t max_tokens = 0;
      for (const Chunk& chunk : chunks)
        max_tokens = std::max(max_tokens, tokens[k * num_ranks + chunk.rank.index()] + chunk.num_tokens);
      if (max_tokens < min_tokens) {
        min_tokens = max_tokens;
        best = k;
      }
    }
    for (const Chunk& chunk : chunks) tokens[best * num_ranks + chunk.rank.index()] += chunk.num_tokens;
    micro_batches[s] = static_cast<int32_t>(best);
  }
  consider_cut(*sums, std::move(micro_batches));
  // Ranks that share may have unequal work of their own, which evens out only within one micro-batch.
  if (sums->attention_tokens_moved() > 0) {
    const auto last = static_cast<int32_t>(num_micro_batches - 1);  // after which gradients are reduced
    consider_cut(*sums, std::vector<int32_t>(order.size(), last));
  }
}

void StepSolver::consider_cut(const Plan& sums, std::vector<int32_t> micro_batches) {
  Ragged<int64_t> chunk_lens;
  for (int32_t s = 0; s < sums.num_sequences(); ++s) append_chunk_lens(sums, SequenceId(s), chunk_lens);
  const std::vector<std::string> solvers(static_cast<size_t>(input_.num_micro_batches), sums.solver());
  std::vector<Plan> plans = plans_as_placed(input_, micro_batches, sums.placements(), chunk_lens, solvers);
  const int64_t limit = input_.sequences.max_tokens_per_rank;
  if (limit > 0 && std::ranges::any_of(plans, [&](const Plan& plan) { return plan.max_tokens() > limit; })) return;
  consider(StepPlan(input_, std::move(micro_batches), std::move(plans)));
}

/// Tokens that a rank of a micro-batch must be able to hold, for the longest sequence.
int64_t share_of_longest(const PlanInput& step) {
  const auto lens = step.seq_lens.lens();
  const int64_t longest = lens.empty() ? 0 : *std::ranges::max_element(lens);
  int32_t sharing = 1;
  for (const BagShape& shape : step.topology.shapes()) sharing = std::max(sharing, shape.num_ranks_per_bag());
  return (longest + sharing - 1) / sharing;
}

/// How many full ranks the fullest replica's tokens need, over all micro-batches, rounded up.
int64_t full_ranks(const PlanInput& step, int64_t max_tokens_per_rank) {
  int64_t max_ranks = 0;
  for (int32_t replica = 0; replica < step.topology.num_replicas(); ++replica) {
    const auto [first, last] = step.sequences_of(replica);
    int64_t tokens = 0;
    for (int32_t s = first.value; s < last.value; ++s) tokens += step.seq_lens[SequenceId(s)];
    max_ranks = std::max(max_ranks, tokens / max_tokens_per_rank + (tokens % max_tokens_per_rank != 0 ? 1 : 0));
  }
  return max_ranks;
}

void check_token_limit(const StepInput& input) {
  const PlanInput& step = input.sequences;
  const int64_t limit = step.max_tokens_per_rank;
  if (limit == 0) return;
  if (share_of_longest(step) > limit) {
    throw_argument<TokenLimitError>(
        "max_tokens_per_rank", limit,
        text("at least ", share_of_longest(step), ": what each rank of the largest bag of topology ",
             step.topology.str(), " holds of the longest sequence"));
  }
  const int32_t num_ranks = step.topology.num_ranks_per_replica();
  if (full_ranks(step, limit) > int64_t{num_ranks} * input.num_micro_batches) {
    throw_argument<TokenLimitError>("max_tokens_per_rank", limit,
                                    text("a limit with which ", num_ranks, " ranks hold the step's tokens in ",
                                         input.num_micro_batches, " micro-batches"));
  }
}

}  // namespace

StepPlan plan_step(StepInput input, std::string_view solver, Effort effort) {
  input.validate();
  planner_for(input.sequences.topology, solver, effort);  // throws at once what each micro-batch's planner would throw
  check_token_limit(input);
  const double blocks_bound_s = blocks_lower_bound_s(input);
  return StepSolver(std::move(input), solver, effort, blocks_bound_s).solve();
}

StepPlan plan_fewest_micro_batches(StepInput input, std::string_view solver, Effort effort) {
  const PlanInput& step = input.sequences;
  if (step.max_tokens_per_rank == 0)
    throw_argument("micro_batches", "'auto' without max_tokens_per_rank", "a limit of tokens per rank, or a number");
  input.num_micro_batches = 1;
  input.validate();
  const int32_t num_ranks = step.topology.num_ranks_per_replica();
  const int64_t min_count = (full_ranks(step, step.max_tokens_per_rank) + num_ranks - 1) / num_ranks;
  for (int64_t k = std::max<int64_t>(min_count, 1);; ++k) {
    input.num_micro_batches = static_cast<int32_t>(std::min<int64_t>(k, StepInput::kMaxMicroBatches));
    try {
      return plan_step(input, solver, effort);
    } catch (const TokenLimitError&) {
      // With every sequence in its own micro-batch, shared by its whole bag, the limit is kept.
      const bool is_last = k >= std::min(step.seq_lens.num_sequences(), StepInput::kMaxMicroBatches);
      if (share_of_longest(step) > step.max_tokens_per_rank || is_last) throw;
    }
  }
}

std::string best_topology(StepInput input, std::string_view solver, bool fewest) {
  PlanInput& step = input.sequences;
  const auto lens = step.seq_lens.lens();
  const int64_t limit = step.max_tokens_per_rank;
  const auto count_of = [](int64_t count) {
    return static_cast<int32_t>(std::clamp<int64_t>(count, 1, StepInput::kMaxMicroBatches));
  };
  if (fewest && limit > 0) {
    const int64_t tokens = std::accumulate(lens.begin(), lens.end(), int64_t{0});
    input.num_micro_batches = count_of((tokens / limit + step.seq_lens.num_ranks()) / step.seq_lens.num_ranks());
  }
  const PlanInput all = limit > 0 ? all_at_once(input) : step;
  const std::vector<TopologyOption> ranked = rank_topologies({&all, 1}, solver);
  if (limit == 0 || (input.num_micro_batches == 1 && !fewest)) return ranked.front().topology;
  const int32_t last = fewest ? count_of(std::ssize(lens)) : input.num_micro_batches;
  for (; input.num_micro_batches <= last; ++input.num_micro_batches) {
    for (const TopologyOption& option : ranked) {
      step.topology = Topology::parse(option.topology, step.seq_lens.num_ranks());
      if (share_of_longest(step) > limit) continue;
      if (fit_by_tokens(input, FitInto::kSmallest) || fit_by_tokens(input, FitInto::kBags)) return option.topology;
    }
  }
  return ranked.front().topology;
}

}  // namespace knapformer
