#include "knapformer/core/lower_bound.h"

#include <gtest/gtest.h>

#include "knapformer/core/planner.h"
#include "tests/core/cases.h"

namespace knapformer {
namespace {

TEST(LowerBound, NoPlanBeatsIt) {
  for (uint64_t seed = 0; seed < 400; ++seed) {
    Cases cases(seed);
    const PlanInput in = cases.input(true, 3000);
    const double bound = lower_bound_s_of(in);
    for (int i = 0; i < 5; ++i) {
      EXPECT_GE(cases.any_plan(in).predicted_time_s(), bound * (1 - 1e-12)) << "seed " << seed;
    }
  }
}

TEST(LowerBound, NoPlanOfFlatBagsTakesLessThanWhatIsProven) {
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

}  // namespace
}  // namespace knapformer
