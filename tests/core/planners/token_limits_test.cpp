// Limits of tokens of a step's micro-batches: the default, those that are given, and what they cost.
#include "knapformer/core/planners/token_limits.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>

#include "knapformer/core/planners/planner.h"
#include "tests/core/planners/whole_step/steps.h"
#include "tests/core/refusals.h"

namespace knapformer {
namespace {

/// Tokens of the fullest rank where each computes its own list, cut into consecutive parts.
int64_t fullest_as_given(const StepInput& input) {
  int64_t fullest = 0;
  for (int32_t r = 0; r < input.sequences.seq_lens.num_ranks(); ++r) {
    const auto lens = input.sequences.seq_lens.lens(Rank(r));
    const int64_t count = std::ssize(lens), parts = input.num_micro_batches;
    for (int64_t k = 0, begin = 0; k < parts; ++k) {
      const int64_t end = begin + count / parts + (k < count % parts ? 1 : 0);
      fullest = std::max(fullest, std::accumulate(lens.begin() + begin, lens.begin() + end, int64_t{0}));
      begin = end;
    }
  }
  return fullest;
}

TEST(TokenLimit, WithoutALimitNoRankHoldsMuchMoreThanInTheGivenOrder) {
  Cases cases(21);
  int num_limited = 0;
  for (int i = 0; i < 200; ++i) {
    StepInput input = random_step(cases, i);
    input.num_micro_batches = static_cast<int32_t>(cases.integer(2, 6));
    const Effort effort{.moves = i % 2 == 0 ? Effort::kLow : Effort::kDefault};
    const int64_t limit = fullest_as_given(input) * 3 / 2;
    const Plan plan = plan_step(input, "balanced", effort);
    EXPECT_LE(plan.max_tokens(), limit) << i;
    EXPECT_EQ(plan.input().sequences.max_tokens_per_rank, limit) << i;
    input.sequences.max_tokens_per_rank = limit;
    EXPECT_EQ(plan_step(input, "balanced", effort), plan) << i;
    input.sequences.max_tokens_per_rank = kNoLimit;
    if (plan_step(input, "balanced", effort).max_tokens() > limit) ++num_limited;
  }
  EXPECT_GE(num_limited, 20);
}

/// Every rank of every micro-batch holds exactly 10,000 tokens as given, and no search finds such a packing again.
TEST(TokenLimit, ALimitThatTheGivenOrderKeepsIsKept) {
  Cases cases(22);
  std::vector<std::vector<int64_t>> lens(8);
  for (auto& list : lens) {
    for (int k = 0; k < 6; ++k) {
      const int64_t a = cases.integer(2000, 3000), b = cases.integer(1000, 3000), c = cases.integer(500, 2000);
      list.insert(list.end(), {a, b, c, 10'000 - a - b - c});
    }
  }
  for (const char* topology : {"g1n8", "g8n1", "g8/4/2/1n1", "g4/2n2"}) {
    for (const StepSync sync : {StepSync::kMicroBatch, StepSync::kStep}) {
      StepInput input = {.sequences = lengths_in(lens, topology, 3072), .num_micro_batches = 6, .sync = sync};
      input.sequences.max_tokens_per_rank = 10'000;
      const Plan plan = plan_step(input, "balanced", {.moves = Effort::kLow});
      plan.validate();
      EXPECT_LE(plan.max_tokens(), 10'000);
    }
  }
}

TEST(TokenLimit, ALimitOfTwiceTheMeanCostsLittle) {
  double over_ideal = 0;
  for (uint64_t seed = 0; seed < 4; ++seed) {
    StepInput input = step_of_mix("mixed", seed, 0.41, 4);
    input.sequences.cluster = {};
    input.sequences.model = {.routed = false};
    const auto lens = input.sequences.seq_lens.lens();
    input.sequences.max_tokens_per_rank = 2 * std::accumulate(lens.begin(), lens.end(), int64_t{0}) / 32 / 4;
    const StepTime time = predict_step(plan_step(input, "balanced", {.moves = Effort::kLow}));
    over_ideal += time.total_s / time.ideal_step_s / 4;
  }
  EXPECT_LE(over_ideal, 1.022);
}

TEST(TokenLimit, KeepsALimitOfTokensInEach) {
  for (const StepSync sync : {StepSync::kMicroBatch, StepSync::kStep}) {
    for (const char* mix : {"mixed", "joint"}) {
      StepInput input = step_of_mix(mix, 1, 0.41, 4);
      input.sync = sync;
      const auto lens = input.sequences.seq_lens.lens();
      const double mean = static_cast<double>(std::accumulate(lens.begin(), lens.end(), int64_t{0})) / 32 / 4;
      for (const double room : {3.0, 1.5, 1.1}) {
        input.sequences.max_tokens_per_rank = static_cast<int64_t>(room * mean);
        const Plan plan = plan_step(input, "balanced");
        plan.validate();
        EXPECT_LE(plan.max_tokens(), input.sequences.max_tokens_per_rank);
        EXPECT_LE(time_s(plan), lower_bound_s(input) * (room > 2 ? 1.08 : 1.2)) << mix << ' ' << room;
      }
      input.sequences.max_tokens_per_rank = static_cast<int64_t>(0.99 * mean);
      EXPECT_THROW(plan_step(input, "balanced"), ArgumentError);
    }
  }
}

TEST(TokenLimit, SharedSequencesGoIntoAnyMicroBatchToKeepALimit) {
  std::vector<std::vector<int64_t>> lens(8, {1024, 1024});
  lens[0] = lens[1] = {60'000, 2048};
  for (const char* topology : {"g8/4/2/1n1", "g8n1"}) {
    for (const int32_t count : {2, 4, 64}) {
      const Plan plan = plan_step(default_step(lens, topology, count, 12'000), "balanced");
      plan.validate();
      EXPECT_LE(plan.max_tokens(), 12'000);
    }
    const StepInput any = default_step(lens, topology, 1, 12'000);
    EXPECT_EQ(plan_fewest_micro_batches(any, "balanced").num_micro_batches(), 2);
  }
  const StepInput exact = default_step({{22}, {327}}, "g2/1n1", 2, 164);  // 327 = 164 + 163
  EXPECT_LE(plan_step(exact, "balanced").max_tokens(), 164);
  EXPECT_EQ(plan_fewest_micro_batches(exact, "balanced").num_micro_batches(), 2);
  const StepInput one_each = default_step({{2064, 2369}, {2087, 2647}, {}, {}}, "g4n1", 4, 860);
  EXPECT_LE(plan_step(one_each, "balanced").max_tokens(), 860);
}

TEST(TokenLimit, NothingIsRefusedThatFitsOneByOne) {
  Cases cases(11);
  for (int i = 0; i < 60; ++i) {
    StepInput input = random_step(cases, i);
    const auto lens = input.sequences.seq_lens.lens();
    if (lens.empty()) continue;
    const int64_t bag = input.sequences.topology.shapes().back().num_ranks_per_bag();
    const int64_t lowest = (std::ranges::max(lens) + bag - 1) / bag;
    input.num_micro_batches = static_cast<int32_t>(std::ssize(lens) + cases.integer(0, 1));
    input.sequences.max_tokens_per_rank = lowest + (i % 3 == 0 ? cases.integer(0, lowest) : 0);
    const Effort effort{.moves = i % 12 == 1 ? Effort::kDefault : Effort::kLow};
    const Plan plan = plan_step(input, "balanced", effort);
    plan.validate();
    EXPECT_LE(plan.max_tokens(), input.sequences.max_tokens_per_rank) << i;
    const Plan fewest = plan_fewest_micro_batches(input, "balanced", effort);
    EXPECT_LE(fewest.max_tokens(), input.sequences.max_tokens_per_rank) << i;
    EXPECT_LE(fewest.num_micro_batches(), std::ssize(lens)) << i;
    if (fewest.num_micro_batches() == 1) continue;
    input.num_micro_batches = fewest.num_micro_batches() - 1;
    EXPECT_THROW(plan_step(input, "balanced", effort), ArgumentError) << i;
  }
}

TEST(TokenLimit, OneThatIsTooLowIsRefusedWithTheLeast) {
  const auto refusal = [](const std::vector<std::vector<int64_t>>& lens, int64_t limit) {
    return refusal_of<TokenLimitError>([&] { plan_step(default_step(lens, "g1n2", 2, limit), "balanced"); });
  };
  EXPECT_EQ(
      refusal({{50, 50, 50}, {50, 50}}, 62),
      "max_tokens_per_rank: got 62, expected at least 63: a replica of 2 ranks has 250 tokens, 2 more than it may "
      "hold in 2 micro-batches");
  EXPECT_EQ(
      refusal({{150, 1}, {1}}, 149),
      "max_tokens_per_rank: got 149, expected at least 150: a sequence of 150 tokens is shared by at most 1 rank, 1 "
      "more tokens each than they may hold");
  // 5 sequences of 50 tokens in 4 lists: some list has two of them, which the least limit does not see.
  EXPECT_NE(refusal({{50, 50, 50}, {50, 50}}, 63), "");
}

TEST(TokenLimit, TheFewestKeepTheLimit) {
  StepInput input = step_of_mix("mixed", 2, 0.41, 4);
  EXPECT_THROW(plan_fewest_micro_batches(input, "balanced"), ArgumentError);  // without a limit
  input.sequences.max_tokens_per_rank = 20'000;
  const Plan plan = plan_fewest_micro_batches(input, "balanced");
  const int64_t tokens = plan.num_tokens();
  EXPECT_LE(plan.max_tokens(), 20'000);
  EXPECT_EQ(plan.num_micro_batches(), (tokens + 32 * 20'000 - 1) / (32 * 20'000));
  input.sequences.max_tokens_per_rank = 100;  // the longest sequence does not fit eight ranks
  EXPECT_THROW(plan_fewest_micro_batches(input, "balanced"), ArgumentError);
}

}  // namespace
}  // namespace knapformer
