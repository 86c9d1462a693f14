#include "knapformer/core/cost/bounds.h"

#include <gtest/gtest.h>

#include "knapformer/core/cost/step_time.h"
#include "knapformer/core/planners/planner.h"
#include "tests/core/cases.h"

namespace knapformer {
namespace {

TEST(LowerBound, NoPlanBeatsIt) {
  for (uint64_t seed = 0; seed < 800; ++seed) {
    Cases cases(seed);
    PlanInput in = cases.input(true, 3000);
    in.cluster.ranks_per_node = static_cast<int32_t>(cases.integer(1, 8));
    in.cluster.overlaps_attention = seed % 2 == 0;
    in.cluster.fixed_s = 0;  // or little else would count
    in.model.mode = static_cast<StepMode>(seed % 3);
    in.model.num_heads = seed % 5 == 0 ? static_cast<int32_t>(cases.integer(1, 12)) : 0;
    if (seed % 7 == 0) in.cluster.node_bytes_per_s = in.cluster.network_bytes_per_s;
    if (seed % 4 == 1) cases.cut_queries(in);
    const double bound = lower_bound_s(in);
    for (int i = 0; i < 5; ++i) EXPECT_GE(step_s(cases.any_plan(in)), bound * (1 - 1e-12)) << "seed " << seed;
  }
}

TEST(FlatBound, NoPlanOfFlatBagsTakesLessThanWhatIsProven) {
  int num_proven = 0;
  for (uint64_t seed = 0; seed < 800; ++seed) {
    Cases cases(seed);
    PlanInput in = cases.input(false, 3000);
    in.d_model = 1024;
    in.topology = Topology::parse(in.topology.str());
    in.seq_lens = cases.lengths(in.topology.num_ranks(), 3000);
    in.cluster.ranks_per_node = static_cast<int32_t>(cases.integer(1, 8));
    if (seed % 3 == 0) in.rank_speed = cases.rank_speed(in.topology.num_ranks());
    in.model.num_heads = seed % 5 == 0 ? static_cast<int32_t>(cases.integer(1, 12)) : 0;
    if (seed % 4 == 1) cases.cut_queries(in);
    const double bound = replica_lower_bound_s(in, in.topology, 0);
    for (const Plan& plan : {cases.any_plan(in), greedy(in), balanced(in, {.moves = 300})}) {
      const double time_s = predict_step(plan).replicas[0].block_s;
      EXPECT_TRUE(time_s == 0 || flat_may_take_less(in, in.topology, 0, time_s * (1 + 1e-9))) << "seed " << seed;
      for (const double below : {0.99, 0.9, 0.8})
        num_proven += time_s * below > bound && !flat_may_take_less(in, in.topology, 0, time_s * below);
    }
  }
  EXPECT_GE(num_proven, 20);  // beyond the bound
}

TEST(FlatBound, WhatSharesNoBagIsCounted) {
  // Three ranks, one with both short ones: though the sum would fit, no long one shares a rank with a middle one.
  PlanInput in;
  in.seq_lens = SequenceLengths::from_lists({{6000, 6000}, {5000, 5000, 5000}, {}});
  in.topology = Topology::parse("g1n3", 3);
  in.d_model = 3072;
  in.workload.gamma = 0;  // then time is as the tokens
  const double second_per_token = BlockRates(in).token_s;
  EXPECT_LE(replica_lower_bound_s(in, in.topology, 0), 9001 * second_per_token);
  EXPECT_FALSE(flat_may_take_less(in, in.topology, 0, 9999 * second_per_token));
  EXPECT_FALSE(flat_may_take_less(in, in.topology, 0, 10'999 * second_per_token));
  EXPECT_TRUE(flat_may_take_less(in, in.topology, 0, 12'001 * second_per_token));
}

}  // namespace
}  // namespace knapformer
