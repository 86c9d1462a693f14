#include "knapformer/core/topology_choice.h"

#include <gtest/gtest.h>

#include <cmath>

#include "knapformer/core/data_mix.h"
#include "knapformer/core/error.h"
#include "knapformer/core/planner.h"

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
  EXPECT_EQ(rank_topologies(batches("low")).front().topology, "g1n32");
  const TopologyOption best = rank_topologies(batches("joint")).front();
  EXPECT_FALSE(Topology::parse(best.topology).is_flat()) << best.topology;
}

TEST(TopologyChoice, IsInOrderAndPredictsWhatThePlansDo) {
  const auto inputs = batches("mixed");
  const auto options = rank_topologies(inputs);
  for (size_t i = 1; i < options.size(); ++i) EXPECT_LE(options[i - 1].predicted_time_s, options[i].predicted_time_s);
  for (const TopologyOption& option : options) {
    double mean = 0;
    for (PlanInput in : inputs) {
      in.topology = Topology::parse(option.topology, 32);
      mean += plan_balanced(in).predicted_time_s() / static_cast<double>(inputs.size());
    }
    EXPECT_NEAR(option.predicted_time_s, mean, mean * 1e-12) << option.topology;
    EXPECT_FALSE(option.reason.empty());
  }
}

TEST(TopologyChoice, HeadsAndTokensLimitIt) {
  for (const TopologyOption& option : rank_topologies(batches("joint"), {.num_heads = 6})) {
    EXPECT_LE(Topology::parse(option.topology).bags().front().num_ranks, 2) << option.topology;
  }
  // One rank cannot hold the longest sequence of the joint mix under this limit; eight can.
  const auto options = rank_topologies(batches("joint", 20000));
  EXPECT_TRUE(std::isfinite(options.front().predicted_time_s));
  EXPECT_TRUE(std::isinf(options.back().predicted_time_s));
}

TEST(TopologyChoice, GreedyHasFlatOnes) {
  for (const TopologyOption& option : rank_topologies(batches("joint"), {.solver = "greedy"})) {
    EXPECT_TRUE(Topology::parse(option.topology).is_flat()) << option.topology;
  }
}

TEST(TopologyChoice, HeadsThatBagsDoNotDivideAreRefused) {
  const Topology topology = Topology::parse("g1n4+g6/3n1+g4n1");
  for (const int32_t good : {0, 12, 24}) EXPECT_NO_THROW(check_heads(topology, good));
  for (const int32_t bad : {-12, -1, 3, 4, 6, 16}) EXPECT_THROW(check_heads(topology, bad), ArgumentError) << bad;
}

TEST(TopologyChoice, RefusesWhatIsNoSample) {
  EXPECT_THROW(rank_topologies(batches("joint"), {.num_heads = -1}), ArgumentError);
  EXPECT_THROW(rank_topologies({}), ArgumentError);
  std::vector<PlanInput> uneven = batches("joint");
  uneven.back().seq_lens = SequenceLengths::from_lists({{4}, {4}});
  EXPECT_THROW(rank_topologies(uneven), ArgumentError);
  EXPECT_THROW(rank_topologies(batches("joint", 20000), {.solver = "magic"}), ArgumentError);
}

}  // namespace
}  // namespace knapformer
