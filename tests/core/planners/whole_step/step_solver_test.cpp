// The planner of a step: its promises on random steps, the best of all on tiny ones, and what it reaches on the mixes.
#include "knapformer/core/planners/whole_step/step_solver.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <tuple>

#include "knapformer/core/cost/bounds.h"
#include "knapformer/core/cost/step_time.h"
#include "knapformer/core/planners/planner.h"
#include "knapformer/core/planners/whole_step/fill_empty_ranks.h"
#include "knapformer/core/util/interrupt.h"
#include "tests/core/cases.h"
#include "tests/core/planners/whole_step/steps.h"
#include "tests/core/refusals.h"

namespace knapformer {
namespace {

/// Nothing if a micro-batch does not keep the limit of tokens.
std::optional<Plan> as_given(const StepInput& input, std::string_view solver, Effort effort = {}) {
  std::vector<int32_t> micro_batches = micro_batches_as_given(input.sequences.seq_lens, input.num_micro_batches);
  std::vector<MicroBatchPlan> plans;
  for (PlanInput& part : micro_batch_inputs(input, micro_batches)) {
    std::optional<MicroBatchPlan> plan = plan_within_limit(std::move(part), solver, effort);
    if (!plan) return std::nullopt;
    plans.push_back(*std::move(plan));
  }
  return Plan(input, std::move(micro_batches), std::move(plans));
}

TEST(MicroBatches, PromisesHoldOnRandomSteps) {
  Cases cases(1);
  int num_given = 0;
  for (int i = 0; i < 120; ++i) {
    StepInput input = random_step(cases, i);
    if (i % 2 == 0) input.sequences.max_tokens_per_rank = kNoLimit;
    if (input.num_micro_batches == 1) input.sync = StepSync::kMicroBatch;  // it makes no difference
    const std::string_view solver = i % 2 == 1 && i % 8 == 1 ? "greedy" : "balanced";
    const Effort effort{.moves = i % 3 == 1 ? Effort::kLow : Effort::kDefault};
    const Plan plan = plan_step(input, solver, effort);
    plan.validate();
    if (input.num_micro_batches > 1 && input.sequences.max_tokens_per_rank == 0)
      input.sequences.max_tokens_per_rank = plan.input().sequences.max_tokens_per_rank;
    EXPECT_EQ(plan.input(), input);
    const std::optional<Plan> given = as_given(input, solver, effort);
    if (given) {
      EXPECT_LE(time_s(plan), time_s(*given) * (1 + 1e-9)) << i;
      ++num_given;
    }
    EXPECT_GE(time_s(plan), lower_bound_s(input) * (1 - 1e-9)) << i;
    EXPECT_EQ(plan, plan_step(input, solver, effort)) << i;
  }
  EXPECT_GE(num_given, 100);
}

TEST(MicroBatches, AStepThatIsEvenAsGivenStaysSo) {
  // Four of one length on each rank, in three micro-batches: two are full, and none can be filled better.
  StepInput input{.sequences = lengths_in({32, std::vector<int64_t>(4, 1000)}, "g1n32", 3072), .num_micro_batches = 3};
  const double even_s = time_s(*as_given(input, "balanced"));
  for (const StepSync sync : {StepSync::kMicroBatch, StepSync::kStep}) {
    input.sync = sync;
    EXPECT_LE(time_s(plan_step(input, "balanced")), even_s * (1 + 1e-12));
  }
}

/// Each would take minutes if all pairs of sequences were tried, or nothing with everything.
TEST(MicroBatches, EqualLengthsThatRanksDoNotDivideArePlannedSoon) {
  for (const auto& [num_sequences, num_ranks] : {std::pair{901, 2}, {2401, 8}}) {
    std::vector<std::vector<int64_t>> lists(static_cast<size_t>(num_ranks));
    for (int32_t i = 0; i < num_sequences; ++i) lists[i % num_ranks].push_back(4096);
    const StepInput input{.sequences = lengths_in(lists, text("g1n", num_ranks), 1024), .num_micro_batches = 1};
    for (const auto moves : {Effort::kLow, Effort::kDefault}) {
      const Plan plan = plan_step(input, "balanced", Effort{.moves = moves});
      EXPECT_EQ(plan.max_tokens(), (num_sequences / num_ranks + 1) * 4096);
    }
  }
}

TEST(MicroBatches, ALoneSequenceInALargeBagIsPlannedSoon) {
  std::vector<std::vector<int64_t>> lists(128);
  lists[0] = {400'000};
  const StepInput input{.sequences = lengths_in(lists, "g128/64/32/16/8/4/2/1n1", 1024), .num_micro_batches = 1};
  plan_step(input, "balanced", Effort{.moves = Effort::kDefault}).validate();
}

TEST(MicroBatches, PackingALargeStepAsksWhetherItIsWanted) {
  struct Unwanted {};
  // Every sequence is shared, and at low effort nothing is annealed.
  StepInput input{.sequences = lengths_in({2048, std::vector<int64_t>(1, 1000)}, "g2/1n1024", 64),
                  .num_micro_batches = 2};
  input.sequences.max_tokens_per_rank = 600;
  interrupt_check = [] { throw Unwanted(); };
  EXPECT_THROW(plan_step(input, "balanced", {.moves = Effort::kLow}), Unwanted);
  interrupt_check = nullptr;
}

/// Of all ways to put whole sequences on ranks of micro-batches, the shortest: by the work on each rank alone, and
/// `gather_s` for each block, behind which the next one's work hides.
double best_of_all(const StepInput& input, double gather_s) {
  const PlanInput& in = input.sequences;
  const auto num_ranks = static_cast<size_t>(in.seq_lens.num_ranks());
  const auto num_bins = num_ranks * static_cast<size_t>(input.num_micro_batches);
  std::vector<double> bins(num_bins, 0.0);
  double best = std::numeric_limits<double>::infinity();
  const std::function<void(int32_t)> place = [&](int32_t s) {
    if (s == in.seq_lens.num_sequences()) {
      double total = 0;
      if (input.sync == StepSync::kMicroBatch) {
        for (size_t k = 0; k < num_bins; k += num_ranks) {
          const double block_s = *std::max_element(bins.begin() + k, bins.begin() + k + num_ranks);
          total += in.cluster.fixed_s + gather_s + (in.model.num_blocks - 1) * std::max(gather_s, block_s) + block_s;
        }
      } else {
        for (size_t r = 0; r < num_ranks; ++r) {
          double sum = 0;
          for (size_t bin = r; bin < num_bins; bin += num_ranks) sum += bins[bin];
          total = std::max(total, in.model.num_blocks * sum);
        }
      }
      best = std::min(best, total);
      return;
    }
    for (double& bin : bins) {
      bin += in.work(SequenceId(s)) / in.cluster.flops_per_s;
      place(s + 1);
      bin -= in.work(SequenceId(s)) / in.cluster.flops_per_s;
    }
  };
  place(0);
  return best;
}

TEST(MicroBatches, TinyStepsAreNearTheBestOfAll) {
  Cases cases(3);
  for (const bool gathers : {false, true}) {
    double sum = 0, worst = 1;
    constexpr int kSteps = 60;
    for (int i = 0; i < kSteps; ++i) {
      StepInput input{.sequences = {.topology = Topology::parse("g1n2"), .d_model = 64, .workload = {}},
                      .num_micro_batches = i % 4 == 3 ? 3 : 2,
                      .sync = i % 3 == 0 && !gathers ? StepSync::kStep : StepSync::kMicroBatch};
      use_block_clock(input.sequences);
      input.sequences.model.routed = false;
      input.sequences.max_tokens_per_rank = kNoLimit;
      const double gather_s = gathers ? 1e-7 * static_cast<double>(cases.integer(1, 20)) : 0;
      if (gathers) {  // each rank fetches half of a block, of 2 bytes a number
        input.sequences.model.num_parameters = gather_s * 200e9 * input.sequences.model.num_blocks;
        input.sequences.cluster.fixed_s = 1e-6;
      }
      std::vector<std::vector<int64_t>> lens(2);
      const int64_t count = cases.integer(2, input.num_micro_batches == 2 ? 8 : 6);
      for (int64_t s = 0; s < count; ++s) lens[s % 2].push_back(cases.integer(10, 2000));
      input.sequences.seq_lens = SequenceLengths::from_lists(lens);
      const double best_s = best_of_all(input, gather_s), reached_s = time_s(plan_step(input, "balanced"));
      EXPECT_GE(best_s, lower_bound_s(input) * (1 - 1e-9));
      EXPECT_GE(reached_s, best_s * (1 - 1e-9));
      worst = std::max(worst, reached_s / best_s);
      sum += reached_s / best_s / kSteps;
    }
    EXPECT_LE(worst, gathers ? 1.002 : 1.0001) << gathers;
    EXPECT_LE(sum, gathers ? 1.0003 : 1.0001) << gathers;
  }
}

struct StepGoal {
  const char* mix;
  double gamma;
  int32_t num_micro_batches;
  double loss, low_loss, exchanged_fraction;
};

class StepGoals : public testing::TestWithParam<StepGoal> {};

TEST_P(StepGoals, AreReachedOnTheMean) {
  const StepGoal goal = GetParam();
  constexpr int kSeeds = 6;
  double loss = 0, low = 0, exchanged_fraction = 0;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    StepInput input = step_of_mix(goal.mix, seed, goal.gamma, goal.num_micro_batches);
    input.sequences.max_tokens_per_rank = kNoLimit;
    const Plan plan = plan_step(input, "balanced");
    loss += strict_loss(plan.plans()) / kSeeds;
    exchanged_fraction += plan.exchanged_fraction() / kSeeds;
    low += strict_loss(plan_step(input, "balanced", {.moves = Effort::kLow}).plans()) / kSeeds;
  }
  EXPECT_LE(loss, goal.loss);
  EXPECT_LE(low, goal.low_loss);
  EXPECT_LE(exchanged_fraction, goal.exchanged_fraction);
}

INSTANTIATE_TEST_SUITE_P(
    Mixes, StepGoals,
    testing::Values(StepGoal{"mixed", 0.41, 2, 1.0425, 1.0445, 0.25}, StepGoal{"joint", 0.41, 2, 1.025, 1.029, 0.15},
                    StepGoal{"mixed", 1.0, 2, 1.036, 1.038, 0.25}, StepGoal{"joint", 1.0, 2, 1.019, 1.021, 0.15},
                    StepGoal{"mixed", 0.41, 3, 1.0003, 1.0026, 0.001},
                    StepGoal{"joint", 0.41, 3, 1.0003, 1.0024, 0.001}, StepGoal{"mixed", 1.0, 3, 1.0003, 1.002, 0.001},
                    StepGoal{"joint", 1.0, 3, 1.016, 1.0178, 0.15}, StepGoal{"mixed", 0.41, 4, 1.0003, 1.0021, 0.0005},
                    StepGoal{"joint", 0.41, 4, 1.0002, 1.0016, 0.0005},
                    StepGoal{"mixed", 1.0, 4, 1.0002, 1.002, 0.0005}, StepGoal{"joint", 1.0, 4, 1.0002, 1.0013, 0.0005},
                    StepGoal{"mixed", 0.41, 8, 1.0002, 1.0002, 0.0003},
                    StepGoal{"joint", 1.0, 8, 1.0002, 1.0008, 0.0003}));

/// Where each micro-batch takes at least what FSDP gathers and a fixed time take.
TEST(MicroBatches, OnTheDefaultClusterStepsAreNearTheIdeal) {
  for (const auto& [mix, num_micro_batches, goal, low_goal] : {std::tuple{"mixed", 2, 1.032, 1.0345},
                                                               {"mixed", 3, 1.0215, 1.024},
                                                               {"mixed", 4, 1.004, 1.0065},
                                                               {"mixed", 5, 1.0075, 1.0095},
                                                               {"mixed", 6, 1.0075, 1.009},
                                                               {"mixed", 8, 1.005, 1.006},
                                                               {"joint", 2, 1.0215, 1.024},
                                                               {"joint", 3, 1.023, 1.0295},
                                                               {"joint", 4, 1.009, 1.0105},
                                                               {"joint", 5, 1.0055, 1.0065},
                                                               {"joint", 6, 1.0045, 1.0055},
                                                               {"joint", 8, 1.0045, 1.0055}}) {
    double over_ideal = 0, low = 0;
    for (uint64_t seed = 0; seed < 6; ++seed) {
      StepInput input = step_of_mix(mix, seed, 0.41, num_micro_batches);
      input.sequences.cluster = {};
      input.sequences.model = {.routed = false};
      const auto over = [&](Effort effort) {
        const StepTime time = predict_step(plan_step(input, "balanced", effort));
        return time.total_s / time.ideal_step_s / 6;
      };
      over_ideal += over({});
      low += over({.moves = Effort::kLow});
    }
    EXPECT_LE(over_ideal, goal) << mix << ' ' << num_micro_batches;
    EXPECT_LE(low, low_goal) << mix << ' ' << num_micro_batches;
  }
}

TEST(MicroBatches, RanksThatWaitOnceNeedNoEvenMicroBatches) {
  for (const char* mix : {"mixed", "joint"}) {
    StepInput input = step_of_mix(mix, 0, 0.41, 4);
    input.sync = StepSync::kStep;
    const Plan plan = plan_step(input, "balanced");
    plan.validate();
    std::vector<double> work(32);
    for (const MicroBatchPlan& part : plan.plans()) {
      EXPECT_GT(part.num_sequences(), 0);
      for (size_t r = 0; r < work.size(); ++r) work[r] += part.workload_after()[r];
    }
    EXPECT_LE(LoadBalance::of(work).max_over_mean(), 1.0005);
    // Every micro-batch holds about its share of the tokens.
    const double share = static_cast<double>(plan.num_tokens()) / 32 / 4;
    EXPECT_LE(static_cast<double>(plan.max_tokens()), 3 * share);
  }
}

TEST(MicroBatches, SharedSequencesAreSpreadWhereThatIsFaster) {
  // Each long sequence takes longer than an even step: in one micro-batch they would leave three with nothing to hide
  // FSDP behind.
  const std::vector<std::vector<int64_t>> lens = {
      {30'000, 1024}, {1024, 1024, 1024}, {30'000}, {1024, 1024, 1024}, {1024, 1024, 1024, 1024}, {1024}, {1024},
      {30'000}};
  for (const int64_t moves : {Effort::kLow, Effort::kDefault, Effort::kHigh}) {
    const double nested_s = time_s(plan_step(default_step(lens, "g8/4/2/1n1", 4), "balanced", {.moves = moves}));
    EXPECT_LE(nested_s, time_s(plan_step(default_step(lens, "g8n1", 4), "balanced", {.moves = moves})));
    EXPECT_LE(nested_s, 6.3);
  }
}

TEST(MicroBatches, NestedBagsAreHardlySlowerThanTheirFlatOnes) {
  Cases cases(12);
  for (int i = 0; i < 60; ++i) {
    std::vector<std::vector<int64_t>> lens(8);
    for (auto& list : lens) {
      for (int64_t s = cases.integer(0, 4); s > 0; --s)
        list.push_back(cases.integer(0, 3) == 0 ? cases.integer(15'000, 60'000) : cases.integer(200, 4000));
    }
    StepInput input = default_step(lens, "g8/4/2/1n1", static_cast<int32_t>(cases.integer(2, 6)));
    if (i % 4 == 0) input.sync = StepSync::kStep;
    const Effort effort{.moves = i % 2 == 0 ? Effort::kDefault : Effort::kLow};
    const double nested_s = time_s(plan_step(input, "balanced", effort));
    for (const char* flat : {"g8n1", "g4n2", "g2n4", "g1n8"}) {
      input.sequences.topology = Topology::parse(flat);
      EXPECT_LE(nested_s, time_s(plan_step(input, "balanced", effort)) * 1.03) << i << ' ' << flat;
    }
  }
}

TEST(MicroBatches, EveryRankIsFilledWhereThereAreSequences) {
  Cases cases(8);
  for (int i = 0; i < 60; ++i) {
    const StepInput input = random_step(cases, i);
    const Plan plan = plan_step(input, "balanced", {.moves = Effort::kLow});
    const Plan filled = fill_empty_ranks(plan);
    filled.validate();
    EXPECT_EQ(fill_empty_ranks(filled), filled) << i;
    EXPECT_LE(filled.max_tokens(), plan.max_tokens()) << i;
    const Topology& topology = input.sequences.topology;
    std::map<int32_t, int32_t> num_empty, num_spare;  // by replica: ranks that take whole sequences; whole sequences
    for (int32_t k = 0; k < input.num_micro_batches; ++k) {
      for (int32_t r = 0; r < topology.num_ranks(); ++r) {
        const Bag& bag = topology.bag(topology.bag_of(Rank(r)));
        const std::vector<Chunk> held = filled.chunks_on(Rank(r), k);
        const int32_t replica = r / topology.num_ranks_per_replica();
        if (held.empty() && topology.shapes()[bag.shape].degrees.front() == 1) ++num_empty[replica];
        if (held.size() < 2) continue;
        for (const int32_t index : filled.plans()[k].chunks_on(Rank(r)))
          num_spare[replica] += filled.plans()[k].degree_of(filled.plans()[k].chunk(index)) == 1 ? 1 : 0;
      }
    }
    for (const auto& [replica, empty] : num_empty) EXPECT_EQ(num_spare[replica], 0) << i;
  }
}

TEST(MicroBatches, AsManySequencesAsRanksMakeOneEach) {
  const StepInput input = default_step({{900, 20}, {500, 10}, {500, 30}, {400, 40}}, "g1n4", 2);
  const Plan filled = fill_empty_ranks(plan_step(input, "balanced"));
  for (int32_t k = 0; k < 2; ++k) {
    for (int32_t r = 0; r < 4; ++r) EXPECT_EQ(filled.chunks_on(Rank(r), k).size(), 1);
  }
}

TEST(MicroBatches, SharedSequencesFillMicroBatchesToo) {
  for (const char* topology : {"g4n1", "g2n2", "g4/2n1", "g4/2/1n1"}) {
    for (const StepSync sync : {StepSync::kMicroBatch, StepSync::kStep}) {
      std::vector<std::vector<int64_t>> lens(4);
      for (int64_t s = 0; s < 48; ++s) lens[s % 4].push_back(100 + 37 * s);
      StepInput input = default_step(lens, topology, 3);
      input.sync = sync;
      const Plan plan = plan_step(input, "balanced");
      const Plan filled = fill_empty_ranks(plan);
      filled.validate();
      EXPECT_LE(filled.max_tokens(), plan.max_tokens());
      for (int32_t k = 0; k < 3; ++k) {
        for (int32_t r = 0; r < 4; ++r) EXPECT_GE(filled.chunks_on(Rank(r), k).size(), 1) << topology << k << r;
      }
    }
  }
}

TEST(MicroBatches, MoreMicroBatchesThanSequences) {
  for (const StepSync sync : {StepSync::kMicroBatch, StepSync::kStep}) {
    StepInput input = default_step({{100, 200}, {}, {300}, {}}, "g2/1n2", 9);
    input.sync = sync;
    const Plan plan = plan_step(input, "balanced");
    plan.validate();
    EXPECT_EQ(plan.plans().size(), 9);
    input.sequences.seq_lens = SequenceLengths::from_lists({{}, {}, {}, {}});
    plan_step(input, "balanced").validate();
  }
}

TEST(MicroBatches, RefusalsNameTheArgument) {
  StepInput input = step_of_mix("mixed", 0, 0.41, 2);
  EXPECT_TRUE(refusal_of([&] { plan_step(input, "greedy"); }).starts_with("solver:"));  // nested bags
  EXPECT_TRUE(refusal_of([&] { plan_step(input, "best"); }).starts_with("solver:"));
  input.num_micro_batches = 0;
  EXPECT_TRUE(refusal_of([&] { plan_step(input, "balanced"); }).starts_with("micro_batches:"));
  input.num_micro_batches = 2;
  input.sequences.max_tokens_per_rank = 100;
  EXPECT_TRUE(refusal_of([&] { plan_step(input, "balanced"); }).starts_with("max_tokens_per_rank:"));
}

}  // namespace
}  // namespace knapformer
