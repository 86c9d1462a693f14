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

}  // namespace
}  // namespace knapformer
