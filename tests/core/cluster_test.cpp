#include "knapformer/core/cluster.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "knapformer/core/error.h"
#include "knapformer/core/plan.h"

namespace knapformer {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Numbers small enough to reckon by hand: width 1, 1 FLOP/s, so 24 s a token and 4 l^2 s of attention.
PlanInput input(std::vector<std::vector<int64_t>> lens, const char* topology, ClusterModel cluster) {
  PlanInput in;
  in.seq_lens = SequenceLengths::from_lists(lens);
  in.topology = Topology::parse(topology, static_cast<int64_t>(lens.size()));
  in.d_model = 1;
  in.cluster = cluster;
  return in;
}

ClusterModel unit_cluster() {
  return {
      .flops_per_s = 1, .node_bytes_per_s = 2, .network_bytes_per_s = 0.5, .bytes_per_number = 2, .ranks_per_node = 2};
}

TEST(BlockTime, RanksThatShareNothingDoNotWait) {
  const Plan plan(
      input({{3}, {5}}, "g2/1n1", unit_cluster()), "any",
      {{.bag = BagId(0), .first_rank = Rank(0), .degree = 1}, {.bag = BagId(0), .first_rank = Rank(1), .degree = 1}});
  const BlockTime time = predict_block_time(plan);
  EXPECT_DOUBLE_EQ(time.group_s[0], 24 * 3 + 4 * 9);
  EXPECT_DOUBLE_EQ(time.group_s[1], 24 * 5 + 4 * 25);
  EXPECT_DOUBLE_EQ(time.slowest_s, 24 * 5 + 4 * 25);
  EXPECT_DOUBLE_EQ(time.ideal_s, (24 * 8 + 4 * 34) / 2.0);
}

TEST(BlockTime, AConnectedGroupTakesItsLongestPhases) {
  // Sequence 0 is cut 6 + 2 over both ranks, sequence 1 lies whole on rank 1.
  const Plan plan(
      input({{8}, {5}}, "g2/1n1", unit_cluster()), "any",
      {{.bag = BagId(0), .first_rank = Rank(0), .degree = 2}, {.bag = BagId(0), .first_rank = Rank(1), .degree = 1}},
      {6, 2, 5});
  const BlockTime time = predict_block_time(plan);
  const double shared = 4 * 64 / 2.0, whole = 4 * 25;
  // 4 numbers of 2 bytes a token, half of which leave, at 2 bytes/s: 2 s a token.
  EXPECT_DOUBLE_EQ(time.ranks[0].token_s, 24 * 6);
  EXPECT_DOUBLE_EQ(time.ranks[1].token_s, 24 * 7);
  EXPECT_DOUBLE_EQ(time.ranks[0].exchange_s, 12);
  EXPECT_DOUBLE_EQ(time.ranks[1].exchange_s, 4);
  EXPECT_DOUBLE_EQ(time.slowest_s, 24 * 7 + std::max(shared + 12, shared + whole + 4));
  EXPECT_EQ(time.group_of_rank[1], Rank(0));
  EXPECT_DOUBLE_EQ(time.group_s[0], time.group_s[1]);
}

TEST(BlockTime, GroupsAcrossNodesHaveTheNetworksBandwidth) {
  const ClusterModel cluster = unit_cluster();
  EXPECT_DOUBLE_EQ(cluster.exchange_s_per_token(Rank(0), 2, 1), 4 * 2 * 0.5 / 2);
  EXPECT_DOUBLE_EQ(cluster.exchange_s_per_token(Rank(1), 2, 1), 4 * 2 * 0.5 / 0.5);
  EXPECT_DOUBLE_EQ(cluster.exchange_s_per_token(Rank(0), 4, 1), 4 * 2 * 0.75 / 0.5);
  EXPECT_DOUBLE_EQ(cluster.exchange_s_per_token(Rank(1), 1, 1), 0);
}

TEST(BlockTime, GroupsAreConnectedThroughOthers) {
  PlanInput in = input({{4}, {4}, {4}, {9}}, "g4/2/1n1", unit_cluster());
  // 0-1 and 2-3 share by twos; one of all four connects them.
  const Plan plan(in, "any",
                  {{.bag = BagId(0), .first_rank = Rank(0), .degree = 2},
                   {.bag = BagId(0), .first_rank = Rank(2), .degree = 2},
                   {.bag = BagId(0), .first_rank = Rank(0), .degree = 4},
                   {.bag = BagId(0), .first_rank = Rank(3), .degree = 1}});
  const BlockTime time = predict_block_time(plan);
  for (int32_t r = 0; r < 4; ++r) EXPECT_EQ(time.group_of_rank[static_cast<size_t>(r)], Rank(0));
}

TEST(BlockTime, SpeedShortensComputeAndNotTheExchange) {
  PlanInput in = input({{8}, {}}, "g2n1", unit_cluster());
  in.rank_speed = {2, 1};
  const Plan plan(in, "any", {{.bag = BagId(0), .first_rank = Rank(0), .degree = 2}});
  const BlockTime time = predict_block_time(plan);
  EXPECT_DOUBLE_EQ(time.ranks[0].token_s, 24 * 4 / 2.0);
  EXPECT_DOUBLE_EQ(time.ranks[0].attention_s, 4 * 64 / 2.0 / 2);
  EXPECT_DOUBLE_EQ(time.ranks[0].exchange_s, time.ranks[1].exchange_s);
  EXPECT_DOUBLE_EQ(time.ideal_s, (24 * 8 + 4 * 64) / 3.0);
}

TEST(BlockTime, IsFiniteOnTheSlowestCluster) {
  constexpr double kLeast = 1 / kMaxMagnitude;
  const Plan plan({.seq_lens = SequenceLengths::from_lists({{SequenceLengths::kMaxSequenceTokens}, {}}),
                   .topology = Topology::parse("g2n1"),
                   .d_model = 1 << 24,
                   .workload = {.gamma = kMaxMagnitude},
                   .cluster = {.flops_per_s = kLeast,
                               .node_bytes_per_s = kLeast,
                               .network_bytes_per_s = kLeast,
                               .bytes_per_number = kMaxMagnitude}},
                  "any", {{.bag = BagId(0), .first_rank = Rank(0), .degree = 2}});
  plan.input().validate();
  EXPECT_TRUE(std::isfinite(plan.predicted_time_s()));
  EXPECT_TRUE(std::isfinite(plan.gap()));
}

TEST(ClusterModel, RefusesWhatIsNoCluster) {
  for (const double bad : {0.0, -1.0, 1e-300, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_THROW((ClusterModel{.flops_per_s = bad}).validate(), ArgumentError);
    EXPECT_THROW((ClusterModel{.node_bytes_per_s = bad}).validate(), ArgumentError);
    EXPECT_THROW((ClusterModel{.network_bytes_per_s = bad}).validate(), ArgumentError);
    EXPECT_THROW((ClusterModel{.bytes_per_number = bad}).validate(), ArgumentError);
  }
  EXPECT_THROW((ClusterModel{.flops_per_s = kInfinity}).validate(), ArgumentError);
  EXPECT_THROW((ClusterModel{.bytes_per_number = 1e300}).validate(), ArgumentError);
  EXPECT_THROW((ClusterModel{.ranks_per_node = 0}).validate(), ArgumentError);
  EXPECT_NO_THROW((ClusterModel{.node_bytes_per_s = kInfinity, .network_bytes_per_s = kInfinity}).validate());
}

}  // namespace
}  // namespace knapformer
