#include "knapformer/core/model/workload.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "knapformer/core/plan/plan.h"
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

TEST(WorkloadFit, RecoversWhatMadeTheLatencies) {
  const std::vector<int64_t> lens = {256, 1024, 4096, 8192, 16384, 25600};
  for (const double gamma : {0.0, 0.385, 1.0, 2.5}) {
    const double k = 2.5e-15;
    std::vector<double> latencies;
    for (const int64_t l : lens) latencies.push_back(k * WorkloadModel{.gamma = gamma}.work(l, 3072));
    const WorkloadFit fit = fit_workload(lens, latencies, 3072);
    EXPECT_NEAR(fit.gamma, gamma, 1e-9);
    EXPECT_NEAR(fit.seconds_per_flop, k, 1e-24);
    EXPECT_LT(fit.relative_rms_error, 1e-9);
    if (gamma != 1) {
      EXPECT_GT(fit.relative_rms_error_without_gamma, 0.01);
    }
  }
}

TEST(WorkloadFit, IsTheMinimumOfTheRelativeError) {
  // Noisy latencies: no step away from the fit may lower what is reported, the root mean square of relative errors.
  const std::vector<int64_t> lens = {500, 1000, 2000, 4000, 8000};
  const std::vector<double> t = {0.011, 0.019, 0.047, 0.099, 0.31};
  const WorkloadFit fit = fit_workload(lens, t, 1024);
  const auto error = [&](double k, double gamma) {
    double sum = 0;
    for (size_t i = 0; i < lens.size(); ++i) {
      sum += std::pow(k * WorkloadModel{.gamma = std::max(0.0, gamma)}.work(lens[i], 1024) / t[i] - 1, 2);
    }
    return std::sqrt(sum / static_cast<double>(lens.size()));
  };
  EXPECT_NEAR(fit.relative_rms_error, error(fit.seconds_per_flop, fit.gamma), 1e-12);
  const double best = error(fit.seconds_per_flop, fit.gamma);
  for (const double dk : {0.99, 1.0, 1.01}) {
    for (const double dg : {0.99, 1.0, 1.01})
      EXPECT_LE(best, error(fit.seconds_per_flop * dk, fit.gamma * dg) * (1 + 1e-12));
  }
}

TEST(WorkloadFit, RefusesPoorData) {
  const std::vector<int64_t> lens = {100, 200, 300};
  EXPECT_THROW(fit_workload(lens, std::vector<double>{1, 2}, 64), ArgumentError);
  EXPECT_THROW(fit_workload(lens, std::vector<double>{1, -2, 3}, 64), ArgumentError);
  EXPECT_THROW(fit_workload(lens, std::vector<double>{1, 2, std::nan("")}, 64), ArgumentError);
  EXPECT_THROW(fit_workload(std::vector<int64_t>{100, 100}, std::vector<double>{1, 2}, 64), ArgumentError);
  EXPECT_THROW(fit_workload(std::vector<int64_t>{100, 0}, std::vector<double>{1, 2}, 64), ArgumentError);
  EXPECT_THROW(fit_workload(lens, std::vector<double>{1, 2, 3}, 0), ArgumentError);
  // Convex far beyond l^2: the best k is negative.
  EXPECT_THROW(fit_workload(std::vector<int64_t>{1000, 10000}, std::vector<double>{1, 1000}, 64), StateError);
}

}  // namespace
}  // namespace knapformer
