#include "knapformer/core/home_assignment.h"

#include <gtest/gtest.h>

#include "knapformer/core/chunk_cut.h"
#include "knapformer/core/plan.h"
#include "tests/core/cases.h"

namespace knapformer {
namespace {

TEST(HomeAssignment, NeverMovesMoreAndNeverChangesTheTime) {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    Cases cases(seed);
    PlanInput in = cases.input(true, 500);
    in.cluster.ranks_per_node = 1 << 20;  // all in one node, so that all bags of a shape are alike
    const Plan plan = cases.any_plan(in);
    std::vector<Placement> placements(plan.placements().begin(), plan.placements().end());
    const Plan before(in, "any", placements, cut_chunks(in, placements));
    assign_homes(in, placements);
    const Plan after(in, "any", placements, cut_chunks(in, placements));
    after.validate();
    // To rounding: sums over sequences in another order, and cuts that differ by a token.
    EXPECT_NEAR(after.predicted_time_s(), before.predicted_time_s(), before.predicted_time_s() * 0.02)
        << "seed " << seed;
  }
}

}  // namespace
}  // namespace knapformer
