#include "knapformer/core/planners/whole_step/topology_choice.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "knapformer/core/model/data_mix.h"
#include "knapformer/core/util/error.h"
#include "tests/core/planners/whole_step/steps.h"

namespace knapformer {
namespace {

std::vector<PlanInput> batches(const char* mix, int64_t max_tokens_per_rank = 0) {
  std::vector<PlanInput> out;
  for (int64_t step = 0; step < 2; ++step) {
    out.push_back({.seq_lens = SequenceLengths::from_lists(DataMix::parse(mix).draw_lengths(1, step, 32)),
                   .topology = {},
                   .d_model = 3072,
                   .workload = {},
                   .max_tokens_per_rank = max_tokens_per_rank});
  }
  return out;
}

TEST(TopologyChoice, SharesOnlyWhereSomethingIsLong) {
  EXPECT_EQ(rank_topologies(batches("low"), "balanced").front().topology, "g1n32");
  const TopologyOption best = rank_topologies(batches("joint"), "balanced").front();
  EXPECT_FALSE(Topology::parse(best.topology).is_flat()) << best.topology;
}

TEST(TopologyChoice, IsInOrderAndPredictsWhatThePlansDo) {
  const auto inputs = batches("mixed");
  const auto options = rank_topologies(inputs, "balanced");
  for (size_t i = 1; i < options.size(); ++i)
    EXPECT_LE(options[i - 1].predicted_time_s, options[i].predicted_time_s * 1.001);
  for (const TopologyOption& option : options) {
    double mean = 0;
    for (PlanInput in : inputs) {
      in.topology = Topology::parse(option.topology, 32);
      mean += step_s(balanced(in)) / static_cast<double>(inputs.size());
    }
    EXPECT_NEAR(option.predicted_time_s, mean, mean * 1e-12) << option.topology;
  }
}

TEST(TopologyChoice, HeadsThatBagsDoNotDivideMakeThemSlower) {
  // 12 heads over 8 ranks are shares of 2 and 1, over 4 ranks of 3: with much attention, bags of 8 fall behind.
  const auto time_of = [](const std::vector<TopologyOption>& options, std::string_view topology) {
    return std::ranges::find(options, topology, &TopologyOption::topology)->predicted_time_s;
  };
  std::vector<PlanInput> inputs = batches("joint");
  for (PlanInput& in : inputs) in.workload.gamma = 4;
  const auto divided = rank_topologies(inputs, "balanced");
  for (PlanInput& in : inputs) in.model.num_heads = 12;
  const auto uneven = rank_topologies(inputs, "balanced");
  EXPECT_LT(time_of(divided, "g8n4"), 1.01 * time_of(divided, "g4n8"));
  EXPECT_GT(time_of(uneven, "g8n4"), 1.1 * time_of(uneven, "g4n8"));
  EXPECT_DOUBLE_EQ(time_of(uneven, "g4n8"), time_of(divided, "g4n8"));
}

TEST(TopologyChoice, AJobThatFillsNoNodesMayShare) {
  for (const auto& [num_ranks, widest] :
       {std::pair{3, "g3/1n1"}, {6, "g6/3/1n1"}, {7, "g7/1n1"}, {12, "g12/6/3/1n1"}}) {
    std::vector<std::vector<int64_t>> lists(static_cast<size_t>(num_ranks), {10});
    lists[0] = {100'000};  // which no fewer ranks than all could compute in the ideal time
    const PlanInput in{.seq_lens = SequenceLengths::from_lists(lists), .topology = {}, .d_model = 3072, .workload = {}};
    const auto options = rank_topologies(std::vector{in}, "balanced");
    const auto named = [&](const std::string& name) {
      return std::ranges::find(options, name, &TopologyOption::topology);
    };
    ASSERT_NE(named(widest), options.end()) << num_ranks;
    ASSERT_NE(named(text("g1n", num_ranks)), options.end());
    EXPECT_LT(options.front().predicted_time_s, 0.6 * named(text("g1n", num_ranks))->predicted_time_s) << num_ranks;
  }
}

TEST(TopologyChoice, ALimitOfTokensRulesSomeOut) {
  // One rank cannot hold the longest sequence of the joint mix under this limit; eight can.
  const auto options = rank_topologies(batches("joint", 20000), "balanced");
  EXPECT_TRUE(std::isfinite(options.front().predicted_time_s));
  EXPECT_TRUE(std::isinf(options.back().predicted_time_s));
}

TEST(TopologyChoice, GreedyHasFlatOnes) {
  for (const TopologyOption& option : rank_topologies(batches("joint"), "greedy")) {
    EXPECT_TRUE(Topology::parse(option.topology).is_flat()) << option.topology;
  }
}

TEST(TopologyChoice, RefusesWhatIsNoSample) {
  EXPECT_THROW(rank_topologies({}, "balanced"), ArgumentError);
  std::vector<PlanInput> mixed_sizes = batches("joint");
  mixed_sizes.back().seq_lens = SequenceLengths::from_lists({{4}, {4}});
  EXPECT_THROW(rank_topologies(mixed_sizes, "balanced"), ArgumentError);
  EXPECT_THROW(rank_topologies(batches("joint", 20000), "magic"), ArgumentError);
}

TEST(BestTopology, OfAStepKeepsTheLimitInEachMicroBatch) {
  // Whole sequences fit, four micro-batches of them; all of them at once would not.
  std::vector<std::vector<int64_t>> lens(8, std::vector<int64_t>(4, 1000));
  EXPECT_EQ(best_topology(default_step(lens, "g8n1", 4, 1100), "balanced", false), "g1n8");
  EXPECT_EQ(best_topology(default_step(lens, "g8n1", 1, 1100), "balanced", true), "g1n8");
  EXPECT_EQ(best_topology(default_step(lens, "g8n1", 1, 4100), "balanced", false), "g1n8");
  EXPECT_EQ(best_topology(default_step(lens, "g8n1", 4), "balanced", false), "g1n8");
  // One sequence fits a rank's four micro-batches, but no micro-batch of one rank.
  lens[0] = {3000};
  const std::string shares = best_topology(default_step(lens, "g8n1", 4, 1600), "balanced", false);
  EXPECT_LE(plan_step(default_step(lens, shares, 4, 1600), "balanced").max_tokens(), 1600);
}

}  // namespace
}  // namespace knapformer
