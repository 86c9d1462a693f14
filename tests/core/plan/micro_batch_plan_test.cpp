#include "knapformer/core/plan/micro_batch_plan.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "knapformer/core/planners/planner.h"
#include "tests/core/cases.h"
#include "tests/core/refusals.h"

namespace knapformer {
namespace {

PlanInput two_ranks(std::vector<std::vector<int64_t>> lens, const char* topology) {
  return {.seq_lens = SequenceLengths::from_lists(lens),
          .topology = Topology::parse(topology),
          .d_model = 4,
          .workload = {.gamma = 0.5}};
}

TEST(SequenceLengths, NumbersSequencesThroughTheRanks) {
  const SequenceLengths lens = SequenceLengths::from_lists({{5, 6}, {}, {7}});
  EXPECT_EQ(lens.num_ranks(), 3);
  EXPECT_EQ(lens.num_sequences(), 3);
  EXPECT_EQ(lens.home_of(SequenceId(2)), Rank(2));
  EXPECT_EQ(lens.first_of(Rank(1)), lens.last_of(Rank(1)));
  EXPECT_EQ(lens.lens(Rank(0)).size(), 2u);
}

TEST(SequenceLengths, RefusesLengthsThatAreNone) {
  for (const int64_t length : {int64_t{0}, int64_t{-1}, SequenceLengths::kMaxSequenceTokens + 1}) {
    EXPECT_EQ(refusal_of([&] { SequenceLengths::from_lists({{4}, {3, length}}); }),
              "seq_lens: got " + std::to_string(length) +
                  " for sequence 1 of rank 1, expected a length of 1 to 2147483647 tokens");
  }
  EXPECT_THROW(SequenceLengths({1, 2}, std::vector<int64_t>{1}), ArgumentError);
  EXPECT_THROW(SequenceLengths({1, 2}, std::vector<int64_t>{3}), ArgumentError);
  EXPECT_THROW(SequenceLengths({1, 2}, std::vector<int64_t>{3, -1}), ArgumentError);
}

TEST(PlanInput, HasACommonMaskWhereAllSequencesHaveOne) {
  PlanInput in = two_ranks({{10, 20}, {5}}, "g2n1");
  EXPECT_EQ(in.common_mask(), Mask());
  in.give_mask(Mask::parse("prefix:3"));
  EXPECT_EQ(in.common_mask(), Mask::parse("prefix:3"));
  in.give_masks({Mask::parse("prefix:3"), Mask::parse("prefix:3"), Mask()});
  EXPECT_EQ(in.common_mask(), std::nullopt);
  in.masks.clear();  // the pairs alone say nothing
  EXPECT_THROW(in.validate(), ArgumentError);
}

// A token's layers are 24 * 4^2 = 384 FLOPs, a pair 0.5 * 4 * 4 = 8.
TEST(MicroBatchPlan, GivenWorkIsSplitInLayersOfTokensAndARestByHeads) {
  const Placement shared = at(0, 0, 2);
  PlanInput in = two_ranks({{10, 20}, {}}, "g2n1");
  in.give_work({5000, 8000});
  EXPECT_EQ(in.token_part, 1);
  const MicroBatchPlan above(in, "any", {shared, shared}, {7, 3, 10, 10});
  above.validate();
  EXPECT_DOUBLE_EQ(above.workload_after()[0], 17 * 384 + (5000 - 3840) / 2.0 + (8000 - 7680) / 2.0);
  EXPECT_DOUBLE_EQ(above.workload_after()[1], 13 * 384 + (5000 - 3840) / 2.0 + (8000 - 7680) / 2.0);

  in.give_work({5000, 3840});  // half of what the second one's tokens cost by the formula
  EXPECT_EQ(in.token_part, 0.5);
  const MicroBatchPlan below(in, "any", {shared, shared}, {7, 3, 10, 10});
  below.validate();
  EXPECT_DOUBLE_EQ(below.workload_after()[0], 17 * 192 + (5000 - 1920) / 2.0);
  EXPECT_DOUBLE_EQ(below.workload_after()[1], 13 * 192 + (5000 - 1920) / 2.0);
}

TEST(MicroBatchPlan, WorkOfASharedSequenceFollowsTheChunkAndTheHeads) {
  const Placement both = at(0, 0, 2);
  const MicroBatchPlan plan(two_ranks({{10}, {}}, "g2n1"), "any", {both}, {7, 3});
  plan.validate();
  const double attention = 0.5 * 4 * 100 * 4 / 2;  // gamma 4 l^2 d / g
  EXPECT_DOUBLE_EQ(plan.workload_after()[0], 24.0 * 7 * 16 + attention);
  EXPECT_DOUBLE_EQ(plan.workload_after()[1], 24.0 * 3 * 16 + attention);
  EXPECT_DOUBLE_EQ(plan.workload_before()[0], 24.0 * 10 * 16 + 2 * attention);
  EXPECT_DOUBLE_EQ(plan.workload_before()[1], 0);
  EXPECT_EQ(plan.tokens_moved(), 3);
  EXPECT_DOUBLE_EQ(plan.attention_tokens_moved(), 5);
  EXPECT_TRUE(std::isinf(plan.balance_before().wir()));
}

TEST(MicroBatchPlan, EvenChunksDifferByAtMostOneTokenAndNoRankCollectsTheRest) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Cases cases(seed);
    const PlanInput input = cases.input(false);
    const MicroBatchPlan plan = greedy(input);
    std::vector<int64_t> extra(static_cast<size_t>(plan.num_ranks()), 0);
    for (int32_t s = 0; s < plan.num_sequences(); ++s) {
      const auto chunks = plan.chunks(SequenceId(s));
      const int64_t share = plan.seq_lens()[SequenceId(s)] / static_cast<int64_t>(chunks.size());
      for (const Chunk& c : chunks) {
        EXPECT_TRUE(c.num_tokens == share || c.num_tokens == share + 1);
        extra[c.rank.index()] += c.num_tokens - share;
      }
    }
    for (const Bag& bag : plan.topology().bags()) {
      const auto first = extra.begin() + bag.first_rank.value;
      const auto [low, high] = std::minmax_element(first, first + bag.num_ranks);
      EXPECT_LE(*high - *low, 1) << "topology " << plan.topology().str() << " seed " << seed;
    }
  }
}

TEST(MicroBatchPlan, SumsAreThoseOfItsParts) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Cases cases(seed);
    const MicroBatchPlan plan = cases.any_plan(cases.input(seed % 2 == 0));
    plan.validate();
    int64_t moved = 0;
    std::vector<int64_t> held(static_cast<size_t>(plan.num_ranks()), 0);
    for (const Chunk& c : plan.chunks()) {
      held[c.rank.index()] += c.num_tokens;
      if (c.rank != plan.seq_lens().home_of(c.sequence)) moved += c.num_tokens;
    }
    EXPECT_EQ(plan.tokens_moved(), moved);
    EXPECT_TRUE(std::equal(held.begin(), held.end(), plan.tokens_after().begin()));
    const double before = std::accumulate(plan.workload_before().begin(), plan.workload_before().end(), 0.0);
    const double after = std::accumulate(plan.workload_after().begin(), plan.workload_after().end(), 0.0);
    EXPECT_NEAR(before, after, 1e-9 * before);
  }
}

TEST(MicroBatchPlan, ValidateFindsEveryBrokenPromise) {
  const auto check = [](const char* topology, Placement place, std::vector<int64_t> chunk_lens) {
    const MicroBatchPlan plan(two_ranks({{10}, {}, {}, {}}, topology), "any", {place}, std::move(chunk_lens));
    EXPECT_THROW(plan.validate(), StateError);
  };
  check("g2n2", at(0, 0, 2), {5, 4});    // a token is lost
  check("g2n2", at(0, 0, 2), {12, -2});  // a chunk of fewer than none
  check("g2n2", at(0, 0, 1), {10});      // no degree of this bag
  check("g2n2", at(0, 1, 2), {5, 5});    // out of its bag
  check("g4/2n1", at(0, 1, 2), {5, 5});  // not aligned
  check("g2n2", at(5, 0, 2), {5, 5});    // no such bag
  const MicroBatchPlan leaves(lengths_in({{10}, {}, {}, {}}, "g2n1", 4), "any", {at(1, 2, 2)}, {5, 5});
  EXPECT_THROW(leaves.validate(), StateError);
}

TEST(MicroBatchPlan, InputIsChecked) {
  EXPECT_THROW(greedy(two_ranks({{1}, {2}, {3}}, "g2n1")), ArgumentError);
  PlanInput input = two_ranks({{1}, {2}}, "g2n1");
  input.d_model = 0;
  EXPECT_THROW(greedy(input), ArgumentError);
  input.d_model = 4;
  input.workload.gamma = -1;
  EXPECT_THROW(greedy(input), ArgumentError);
  input.workload.gamma = 0.5;
  for (const std::vector<double>& speeds : std::vector<std::vector<double>>{
           {1}, {1, 0}, {1, -1}, {1, NAN}, {1, INFINITY}, {1e300, 1e300}, {1e-30, 1e-30}, {1e-4, 1e3}}) {
    input.rank_speed = speeds;
    EXPECT_THROW(input.validate(), ArgumentError) << testing::PrintToString(speeds);
  }
  for (const std::vector<double>& speeds :
       std::vector<std::vector<double>>{{1e-12, 1e-12}, {4e14, 3e14}, {1e-3, 1e3}}) {
    input.rank_speed = speeds;
    EXPECT_NO_THROW(input.validate()) << testing::PrintToString(speeds);
  }
}

}  // namespace
}  // namespace knapformer
