#include "knapformer/core/lower_bound.h"

#include <gtest/gtest.h>

#include "knapformer/core/plan.h"
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

}  // namespace
}  // namespace knapformer
