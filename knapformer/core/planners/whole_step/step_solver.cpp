#include "knapformer/core/planners/whole_step/step_solver.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <optional>

#include "knapformer/core/cost/bounds.h"
#include "knapformer/core/cost/step_time.h"
#include "knapformer/core/planners/attention_cuts_and_stages.h"
#include "knapformer/core/planners/balanced/locality.h"
#include "knapformer/core/planners/balanced/uneven_chunks.h"
#include "knapformer/core/planners/planner.h"
#include "knapformer/core/planners/token_limits.h"
#include "knapformer/core/planners/whole_step/levels.h"
#include "knapformer/core/util/error.h"

namespace knapformer {
namespace {

/// In a step of more sequences each micro-batch is planned at low effort.
constexpr size_t kFewSequences = 4096;
/// What is shorter by less may be the rounding of sums in another order.
constexpr double kShorter = 1 - 1e-12;
/// A plan that takes long to make, or holds the most tokens, must shorten the step by this factor. Half or double
/// changes steps by less than 0.01 %.
constexpr double kHardly = 1.001;
/// Where ranks wait once, one micro-batch of all sequences must shorten the step by this factor. Half: steps of joint
/// at low effort are 0.1 % shorter and hold more tokens; double: 0.2 % longer.
constexpr double kMustGain = 1.02;

class StepSolver {
 public:
  /// `input`: has a limit of tokens. `effort`: of each micro-batch's planner.
  StepSolver(StepInput input, std::string_view solver, Effort effort)
      : input_(std::move(input)), solver_(solver), effort_(effort) {}

  Plan solve() {
    if (input_.sync == StepSync::kStep) consider_sums();
    if (!best_ && blocks_lower_bound_s(input_) > 0) {  // where there is work
      if (const auto packing = pack_by_time(input_, num_usable(), effort_)) consider(*packing);
    }
    const SequenceLengths& seq_lens = input_.sequences.seq_lens;
    const size_t num_sequences = seq_lens.lens().size();
    consider_as_assigned(micro_batches_as_given(seq_lens, input_.num_micro_batches),
                         num_sequences <= kFewSequences ? 1 : kHardly);
    // One micro-batch of all sequences holds the most tokens.
    if (input_.sync == StepSync::kMicroBatch) consider_as_assigned(std::vector<int32_t>(num_sequences, 0), kHardly);
    for (const bool in_whole_bags : {false, true}) {
      if (!best_) consider(pack_by_tokens(input_.sequences, num_usable(), in_whole_bags));
    }
    if (!best_) consider(pack_at_home(input_));
    if (!best_) {
      if (const auto packing = pack_one_by_one(input_)) consider(*packing);
    }
    if (!best_) refuse_step(input_, solver_);
    return std::move(*best_);
  }

 private:
  /// Keeps the plan if its time, multiplied by `handicap`, is below that of the best so far.
  void consider(Plan plan, double handicap = 1) {
    const double time_s = predict_step(plan).total_s;
    if (best_ && time_s * handicap >= best_s_ * kShorter) return;
    best_s_ = time_s;
    best_ = std::move(plan);
  }

  /// How many micro-batches can be of use: with more, even if every sequence has a largest bag to itself, some stay
  /// empty.
  int32_t num_usable() const {
    constexpr int64_t kMostRanks = 1 << 19;  // of all micro-batches of a replica: the planner's memory
    const PlanInput& step = input_.sequences;
    const int64_t num_bags = step.topology.shapes().back().num_bags;
    int64_t usable = 1;
    for (int32_t r = 0; r < step.topology.num_replicas(); ++r) {
      const auto [first, last] = step.sequences_of(r);
      usable = std::max(usable, (last.value - first.value + num_bags - 1) / num_bags);
    }
    const int64_t most = std::max<int64_t>(1, kMostRanks / step.topology.num_ranks_per_replica());
    return static_cast<int32_t>(std::min({int64_t{input_.num_micro_batches}, usable, most}));
  }

  void consider(const Packing& packing) {
    std::vector<PlanInput> inputs = micro_batch_inputs(input_, packing.micro_batches);
    std::vector<std::vector<Placement>> placements(inputs.size());
    for (size_t s = 0; s < packing.placements.size(); ++s)
      placements[packing.micro_batches[s]].push_back(packing.placements[s]);
    std::vector<MicroBatchPlan> plans;
    for (size_t k = 0; k < inputs.size(); ++k) {
      bring_home(inputs[k], placements[k]);
      std::vector<int64_t> chunk_lens = uneven_chunk_lens(inputs[k], placements[k]);
      MicroBatchPlan packed(std::move(inputs[k]), "packed", std::move(placements[k]), std::move(chunk_lens));
      std::optional<MicroBatchPlan> plan =
          packed_or_planned(std::move(packed), k < packing.levels_s.size() ? packing.levels_s[k] : 0);
      if (!plan) return;
      plans.push_back(*std::move(plan));
    }
    consider(Plan(input_, packing.micro_batches, std::move(plans)));
  }

  /// `plan`, or the planner's plan where `plan` is not near its bound and the planner's is shorter. Nothing if neither
  /// keeps the limit of tokens.
  std::optional<MicroBatchPlan> packed_or_planned(MicroBatchPlan plan, double level_s) const {
    // Half or double: steps change by 0.02 %.
    const double tolerance = effort_.moves == Effort::kLow ? 1.005 : 1.002;
    const bool is_kept = plan.keeps_limit();
    const MicroBatchTime time = predict_micro_batch(plan);
    bool is_good = is_kept;
    for (int32_t r = 0; r < plan.topology().num_replicas() && is_good; ++r) {
      const double least_s = std::max(level_s, replica_lower_bound_s(plan.input(), plan.topology(), r));
      is_good = time.replica_block_s[r] <= least_s * tolerance;
    }
    if (is_good) return plan;
    // A limit of tokens may need all moves. Else steps are 0.006 % shorter with them, and planning 1.7 times as long.
    const int32_t of_replica = plan.num_sequences() / plan.topology().num_replicas();
    Effort effort = effort_;
    if (is_kept && effort.moves < 0) effort.moves = effort.num_moves(of_replica, /*must_search=*/false) / 4;
    std::optional<MicroBatchPlan> other = plan_within_limit(plan.input(), solver_, effort);
    if (is_kept && (!other || predict_micro_batch(*other).total_s() >= time.total_s())) return plan;
    return other;
  }

  /// All sequences are planned as if there were one micro-batch, so that the ranks' sums are even. Then each rank's
  /// sequences are cut into micro-batches.
  void consider_sums() {
    PlanInput all = input_.all_at_once();
    const Topology topology = all.topology;
    // Where nothing is shared no rank waits, so that comes first.
    all.topology = topology.within(1);
    if (all.topology != topology && consider_sums(all)) return;
    all.topology = topology;
    consider_sums(all);
  }

  /// Returns whether there is a plan whose ranks are about as even as can be.
  bool consider_sums(const PlanInput& all) {
    const std::optional<MicroBatchPlan> sums = plan_within_limit(all, solver_, effort_);
    if (!sums) return false;
    consider_cut(*sums, dealt_by_tokens(*sums), 1);
    // Ranks that share may have unequal work of their own, which evens out only within one micro-batch.
    if (sums->attention_tokens_moved() > 0) {
      const int32_t last = input_.num_micro_batches - 1;  // after which gradients are reduced
      consider_cut(*sums, std::vector<int32_t>(static_cast<size_t>(sums->num_sequences()), last), kMustGain);
    }
    const MicroBatchTime time = predict_micro_batch(*sums);
    const double block_s = std::ranges::max(time.replica_block_s);
    return best_ && block_s <= kHardly * blocks_lower_bound_s(input_);
  }

  /// Micro-batches in which each rank has about equally many tokens. Shared sequences come first, since their ranks
  /// must all have them in the same micro-batch.
  std::vector<int32_t> dealt_by_tokens(const MicroBatchPlan& sums) const {
    const auto num_ranks = static_cast<size_t>(sums.num_ranks());
    std::vector<SequenceId> order;
    for (SequenceId id(0); id.value < sums.num_sequences(); ++id.value) order.push_back(id);
    std::ranges::stable_sort(order, std::greater(),
                             [&](SequenceId id) { return std::pair(sums.placement(id).degree, sums.seq_lens()[id]); });
    std::vector<int64_t> tokens(num_ranks * static_cast<size_t>(input_.num_micro_batches));  // [micro-batch][rank]
    std::vector<int32_t> micro_batches(order.size());
    std::vector<int64_t> most(static_cast<size_t>(input_.num_micro_batches));
    for (const SequenceId id : order) {
      const auto chunks = sums.chunks(id);
      const auto tokens_with = [&](int32_t k) {  // of the fullest of its ranks
        int64_t fullest = 0;
        for (const Chunk& chunk : chunks)
          fullest = std::max(fullest, tokens[k * num_ranks + chunk.rank.index()] + chunk.num_tokens);
        return fullest;
      };
      for (int32_t k = 0; k < input_.num_micro_batches; ++k) most[k] = tokens_with(k);
      const auto best = static_cast<int32_t>(std::ranges::min_element(most) - most.begin());
      for (const Chunk& chunk : chunks) tokens[best * num_ranks + chunk.rank.index()] += chunk.num_tokens;
      micro_batches[id.index()] = best;
    }
    return micro_batches;
  }

  /// Considers the plan of all sequences, cut into these micro-batches, if that keeps the limit of tokens.
  void consider_cut(const MicroBatchPlan& sums, std::vector<int32_t> micro_batches, double handicap) {
    const std::vector<std::string> solvers(static_cast<size_t>(input_.num_micro_batches), sums.solver());
    std::vector<Placement> placements(sums.placements().begin(), sums.placements().end());
    for (Placement& place : placements) place.bag = input_.sequences.topology.bag_of(place.first_rank);
    std::vector<MicroBatchPlan> plans = plans_as_placed(input_, micro_batches, placements, sums.chunk_lens(), solvers);
    if (!std::ranges::all_of(plans, &MicroBatchPlan::keeps_limit)) return;
    consider(Plan(input_, std::move(micro_batches), std::move(plans)), handicap);
  }

  /// Plans one micro-batch after another. Stops once those planned, with the lower bounds of the rest, take no less
  /// time than the best step so far.
  void consider_as_assigned(std::vector<int32_t> micro_batches, double handicap) {
    const std::vector<PlanInput> inputs = micro_batch_inputs(input_, micro_batches);
    const auto fits = [](const PlanInput& input) { return least_token_limit(input, 1) <= input.max_tokens_per_rank; };
    if (!std::ranges::all_of(inputs, fits)) return;
    std::vector<double> bounds_s;
    for (const PlanInput& input : inputs) bounds_s.push_back(lower_bound_s({input}));
    double least_s = std::accumulate(bounds_s.begin(), bounds_s.end(), 0.0);
    std::vector<MicroBatchPlan> plans;
    for (size_t k = 0; k < inputs.size(); ++k) {
      if (best_ && input_.sync == StepSync::kMicroBatch && least_s * handicap >= best_s_) return;
      std::optional<MicroBatchPlan> plan = plan_within_limit(inputs[k], solver_, effort_);
      if (!plan) return;
      least_s += predict_micro_batch(*plan).total_s() - bounds_s[k];
      plans.push_back(*std::move(plan));
    }
    consider(Plan(input_, std::move(micro_batches), std::move(plans)), handicap);
  }

  StepInput input_;
  std::string_view solver_;
  Effort effort_;
  std::optional<Plan> best_;
  double best_s_ = 0;
};

}  // namespace

Plan plan_step(StepInput input, std::string_view solver, Effort effort) {
  input.validate();
  if (input.sequences.attention_cuts.empty()) cut_attention(input.sequences, input.num_micro_batches);
  planner_for(input.sequences.topology, solver, effort);  // throws at once what each micro-batch's planner would throw
  const bool is_single = input.num_micro_batches == 1;
  if (is_single) {
    if (std::optional<MicroBatchPlan> plan = plan_within_limit(input.sequences, solver, effort))
      return *std::move(plan);
  }
  if (!is_single && input.sequences.max_tokens_per_rank == 0)
    input.sequences.max_tokens_per_rank = default_token_limit(input);
  try {
    if (least_token_limit(input.sequences, input.num_micro_batches) > input.sequences.max_tokens_per_rank)
      refuse_below_least(input.sequences, input.num_micro_batches);
    if (input.sequences.seq_lens.lens().size() > kFewSequences) effort.moves = Effort::kLow;
    return StepSolver(input, solver, effort).solve();
  } catch (const TokenLimitError&) {
    if (is_single) plan_micro_batch(input.sequences, solver, effort);  // throws, and names a limit that it keeps
    throw;
  }
}

Plan plan_fewest_micro_batches(StepInput input, std::string_view solver, Effort effort) {
  const PlanInput& step = input.sequences;
  if (step.max_tokens_per_rank == 0)
    throw_argument("micro_batches", "'auto' without max_tokens_per_rank", "a limit of tokens per rank, or a number");
  input.num_micro_batches = 1;
  input.validate();
  const auto rounded_up = [](int64_t whole, int64_t part) { return whole > 0 ? (whole - 1) / part + 1 : 1; };
  const int64_t full_ranks = rounded_up(tokens_of_fullest_replica(step), step.max_tokens_per_rank);
  for (int64_t k = rounded_up(full_ranks, step.topology.num_ranks_per_replica());; ++k) {
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

}  // namespace knapformer
