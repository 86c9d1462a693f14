#include "knapformer/core/topology_choice.h"

#include <gtest/gtest.h>

#include <cmath>

#include "knapformer/core/data_mix.h"
#include "knapformer/core/error.h"
#include "knapformer/core/planner.h"

namespace knapformer {
namespace {

std::vector<SequenceLengths> batches(const char* mix) {
  std::vector<SequenceLengths> out;
  for (int64_t step = 0; step < 2; ++step)
    out.push_back(SequenceLengths::from_lists(DataMix::parse(mix).draw_lengths(1, step, 32)));
  return out;
}

TEST(TopologyChoice, SharesOnlyWhereSomethingIsLong) {
  EXPECT_EQ(rank_topologies(batches("low"), {.d_model = 3072}).front().topology, "g1n32");
  const TopologyOption best = rank_topologies(batches("joint"), {.d_model = 3072}).front();
  EXPECT_FALSE(Topology::parse(best.topology).is_flat()) << best.topology;
}

TEST(TopologyChoice, IsInOrderAndPredictsWhatThePlansDo) {
  const auto lens = batches("mixed");
  const auto options = rank_topologies(lens, {.d_model = 3072});
  for (size_t i = 1; i < options.size(); ++i) EXPECT_LE(options[i - 1].predicted_time_s, options[i].predicted_time_s);
  for (const TopologyOption& option : options) {
    double mean = 0;
    for (const SequenceLengths& batch : lens) {
      PlanInput in;
      in.seq_lens = batch;
      in.topology = Topology::parse(option.topology, 32);
      in.d_model = 3072;
      mean += plan_balanced(in).predicted_time_s() / static_cast<double>(lens.size());
    }
    EXPECT_NEAR(option.predicted_time_s, mean, mean * 1e-12) << option.topology;
    EXPECT_FALSE(option.reason.empty());
  }
}

TEST(TopologyChoice, HeadsAndTokensLimitIt) {
  for (const TopologyOption& option : rank_topologies(batches("joint"), {.d_model = 3072, .num_heads = 2})) {
    EXPECT_LE(Topology::parse(option.topology).bags().front().num_ranks, 2) << option.topology;
  }
  // One rank cannot hold the longest sequence of the joint mix under this limit; eight can.
  const auto options = rank_topologies(batches("joint"), {.d_model = 3072, .max_tokens_per_rank = 20000});
  EXPECT_TRUE(std::isfinite(options.front().predicted_time_s));
  EXPECT_TRUE(std::isinf(options.back().predicted_time_s));
}

TEST(TopologyChoice, RefusesBatchesThatAreNone) {
  EXPECT_THROW(rank_topologies({}, {.d_model = 8}), ArgumentError);
  const std::vector<SequenceLengths> uneven = {SequenceLengths::from_lists({{4}}),
                                               SequenceLengths::from_lists({{4}, {4}})};
  EXPECT_THROW(rank_topologies(uneven, {.d_model = 8}), ArgumentError);
}

}  // namespace
}  // namespace knapformer
