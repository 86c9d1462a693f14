// What is proven of flat bags, against plans.
#include "knapformer/core/flat_bound.h"

#include <gtest/gtest.h>

#include "knapformer/core/lower_bound.h"
#include "knapformer/core/planner.h"
#include "tests/core/cases.h"

namespace knapformer {
namespace {

TEST(FlatBound, NoPlanOfFlatBagsTakesLessThanWhatIsProven) {
  int num_proven = 0;
  for (uint64_t seed = 0; seed < 400; ++seed) {
    Cases cases(seed);
    PlanInput in = cases.input(false, 3000);
    in.d_model = 1024;
    in.topology = Topology::parse(in.topology.str());
    in.seq_lens = cases.lengths(in.topology.num_ranks(), 3000);
    in.cluster.ranks_per_node = static_cast<int32_t>(cases.integer(1, 8));
    if (seed % 3 == 0) in.rank_speed = cases.rank_speed(in.topology.num_ranks());
    const double bound = lower_bound_s_of(in);
    for (const Plan& plan : {cases.any_plan(in), plan_greedy(in), plan_balanced(in, {.moves = 300})}) {
      const double time_s = plan.predicted_time_s();
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
  const double second_per_token = in.work(SequenceId(0)) / 6000 / in.cluster.flops_per_s;
  EXPECT_LE(lower_bound_s_of(in), 9001 * second_per_token);
  EXPECT_FALSE(flat_may_take_less(in, in.topology, 0, 9999 * second_per_token));
  EXPECT_FALSE(flat_may_take_less(in, in.topology, 0, 10'999 * second_per_token));
  EXPECT_TRUE(flat_may_take_less(in, in.topology, 0, 12'001 * second_per_token));
}

}  // namespace
}  // namespace knapformer
