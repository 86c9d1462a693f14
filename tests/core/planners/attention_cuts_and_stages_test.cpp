#include "knapformer/core/planners/attention_cuts_and_stages.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "knapformer/core/planners/whole_step/topology_choice.h"
#include "tests/core/cases.h"

namespace knapformer {
namespace {

PlanInput one_long(int32_t num_ranks, int64_t length, std::string_view topology, TrainedModel model) {
  Cases cases(static_cast<uint64_t>(length));
  std::vector<std::vector<int64_t>> lens(static_cast<size_t>(num_ranks));
  for (auto& list : lens) {
    for (int i = 0; i < 4; ++i) list.push_back(cases.integer(1024, 16384));
  }
  lens[0].push_back(length);
  PlanInput input = lengths_in(lens, topology, 3072);
  input.model = model;
  return input;
}

TEST(AttentionCuts, LeaveNoRankIdleAndNoneWithAThirdMore) {
  for (const int32_t degree : {2, 3, 7, 8, 16, 32}) {
    for (const int32_t heads : {1, 5, 12, 24, 38}) {
      for (const int32_t kv_heads : {1, heads}) {
        PlanInput input = one_long(degree, 200'000, text('g', degree, "n1"),
                                   {.num_heads = heads, .num_kv_heads = kv_heads, .cuts_queries = true});
        cut_attention(input);
        const AttentionShares shares = input.attention_shares();
        double least = 1, most = 0, sum = 0;
        for (int32_t i = 0; i < degree; ++i) {
          const double part = shares.part(1, degree, i);
          least = std::min(least, part);
          most = std::max(most, part);
          sum += part;
        }
        EXPECT_NEAR(sum, 1, 1e-12);
        EXPECT_GT(least, 0);
        EXPECT_LE(3 * most, 4 * least * (1 + 1e-12)) << degree << " ranks, " << heads << " heads";
        EXPECT_DOUBLE_EQ(most, shares.max(degree));
      }
    }
  }
}

TEST(AttentionCuts, AreMadeWhereTheKernelTakesThemAlone) {
  for (const TrainedModel& model : {TrainedModel{.num_heads = 3}, TrainedModel{.cuts_queries = true}}) {
    PlanInput input = one_long(4, 9000, "g4n1", model);
    cut_attention(input);
    EXPECT_EQ(input.attention_cut(4).num_parts, 1);
  }
}

TEST(AttentionCuts, EvenHeadsAreCutAsByUlysses) {
  PlanInput input = one_long(8, 100'000, "g8/4/2/1n1", {.num_heads = 24, .cuts_queries = true});
  cut_attention(input);
  for (const int32_t degree : {2, 4, 8}) EXPECT_EQ(input.attention_cut(degree).num_parts, 1);
}

/// Predicted step over ideal, the best of the topology.
double over_ideal(int32_t num_ranks, int64_t length, std::string_view topology, int32_t heads) {
  const MicroBatchPlan plan =
      balanced(one_long(num_ranks, length, topology, {.num_heads = heads, .cuts_queries = true}));
  plan.validate();
  return predict_micro_batch(plan).over_ideal();
}

TEST(AttentionCuts, LongClipsTakeLittleMoreThanTheirShare) {
  EXPECT_LT(over_ideal(32, 250'000, "g32/16/8/4/2/1n1", 24), 1.08);
  EXPECT_LT(over_ideal(32, 500'000, "g32/16/8/4/2/1n1", 24), 1.08);
  EXPECT_LT(over_ideal(64, 1'000'000, "g64/32/16/8/4/2/1n1", 24), 1.10);
  for (const int32_t heads : {12, 38, 30}) {
    EXPECT_LT(over_ideal(8, 250'000, "g8/4/2/1n1", heads), 1.03 * over_ideal(8, 250'000, "g8/4/2/1n1", 32));
  }
}

TEST(AttentionCuts, OfClipsAloneAreNotHiddenBehindWholeSequences) {
  const std::vector<std::vector<std::vector<int64_t>>> clips = {
      {{32'760}, {32'760}, {20'000}, {32'760}, {}, {}, {}, {}}, {{75'600}, {}, {}, {}, {}, {}, {}, {}}};
  for (const auto& lens : clips) {
    const auto step_s = [&](std::string_view topology) {
      PlanInput input = lengths_in(lens, topology, 1536);
      input.model = {.num_heads = 12, .cuts_queries = true};
      return predict_micro_batch(balanced(input)).total_s();
    };
    EXPECT_LE(step_s("g8/4/2/1n1"), 1.001 * step_s("g8n1"));
  }
}

TEST(AttentionCuts, KeysComeInStagesOfAtMostTheGivenBytes) {
  for (const int32_t heads : {1, 2, 12, 24}) {
    const bool is_step = heads == 24;  // of four micro-batches, in each of which one of these comes
    PlanInput input = lengths_in({std::vector<int64_t>(is_step ? 4 : 1, 100'000), {}, {}, {}}, "g4n1", 3072);
    input.model = {.num_heads = heads, .cuts_queries = true};
    const double all_bytes = 2.0 * 100'000 * 3072 * input.model.element_size;
    const auto stage_bytes = [&](double limit) {
      input.model.max_stage_bytes = limit;
      cut_attention(input, is_step ? 4 : 1);
      const AttentionCut cut = input.attention_cut(4);
      return all_bytes * cut.num_parts / 4 / cut.num_stages;
    };
    // One part in one stage brings a quarter; two parts, of half the heads each, in four stages an eighth.
    const double least = all_bytes / (heads == 1 ? 4 : 8), free = stage_bytes(0);
    EXPECT_EQ(stage_bytes(free), free);
    EXPECT_GT(free, least);
    for (double limit = free; limit > least / 4; limit *= 0.7)
      EXPECT_LE(stage_bytes(limit), std::max(limit, least)) << heads << " heads, at most " << limit;
  }
}

TEST(AttentionCuts, TopologiesOfAllRanksAreRankedWhereASequenceNeedsThem) {
  const auto widest = [](int64_t length) {
    const PlanInput input = one_long(32, length, "g1n32", {.num_heads = 24, .cuts_queries = true});
    const std::vector<TopologyOption> options = rank_topologies({&input, 1}, "balanced");
    EXPECT_EQ(options.front().topology.starts_with("g32/16/8/4/2/1"), length > 100'000) << options.front().topology;
    return std::ranges::any_of(options, [](const auto& option) { return option.topology == "g32n1"; });
  };
  EXPECT_TRUE(widest(500'000));
  EXPECT_FALSE(widest(20'000));
}

}  // namespace
}  // namespace knapformer
