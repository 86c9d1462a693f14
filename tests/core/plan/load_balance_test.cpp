#include "knapformer/core/plan/load_balance.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace knapformer {
namespace {

LoadBalance of(std::vector<double> load) { return LoadBalance::of(load); }

TEST(LoadBalance, HasAnAnswerForEveryLoad) {
  EXPECT_DOUBLE_EQ(of({1, 2, 3}).wir(), 3);
  EXPECT_DOUBLE_EQ(of({1, 2, 3}).max_over_mean(), 1.5);
  EXPECT_DOUBLE_EQ(of({2, 2}).wir(), 1);
  EXPECT_TRUE(std::isinf(of({0, 5}).wir()));
  EXPECT_DOUBLE_EQ(of({0, 5}).max_over_mean(), 2);
  EXPECT_DOUBLE_EQ(of({0, 0}).wir(), 1);
  EXPECT_DOUBLE_EQ(of({0, 0}).max_over_mean(), 1);
  EXPECT_DOUBLE_EQ(of({}).wir(), 1);
}

}  // namespace
}  // namespace knapformer
