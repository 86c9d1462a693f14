#include "knapformer/core/model/workload.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "knapformer/core/plan/micro_batch_plan.h"
#include "knapformer/core/util/error.h"

namespace knapformer {
namespace {

TEST(Workload, IsTheFormulaOfThePaper) {
  // By hand, l = 256, d = 3072: 24 * 256 * 3072^2 = 57,982,058,496; 4 * 256^2 * 3072 = 805,306,368.
  EXPECT_DOUBLE_EQ((WorkloadModel{.gamma = 1}.work(256, 3072)), 57982058496.0 + 805306368.0);
  EXPECT_DOUBLE_EQ(WorkloadModel{}.work(256, 3072), (WorkloadModel{.gamma = 0.41}.work(256, 3072)));
  EXPECT_DOUBLE_EQ((WorkloadModel{.gamma = 0.5}.work(256, 3072)), 57982058496.0 + 402653184.0);
}

TEST(Workload, RefusesWhatIsNoWorkload) {
  const double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
  for (const double gamma : {-1.0, nan, inf, 1e308})
    EXPECT_THROW(WorkloadModel{.gamma = gamma}.validate(), ArgumentError);
  EXPECT_NO_THROW(WorkloadModel{.gamma = 0}.validate());
}

TEST(Workload, IsFiniteWithTheLargestOfEverything) {
  const WorkloadModel model{.gamma = kMaxMagnitude};
  model.validate();
  const double most_sequences = std::numeric_limits<int32_t>::max();
  EXPECT_TRUE(std::isfinite(most_sequences * model.work(SequenceLengths::kMaxSequenceTokens, 1 << 24)));
}

}  // namespace
}  // namespace knapformer
