// The time of a step of several micro-batches.
#include <gtest/gtest.h>

#include <initializer_list>
#include <numeric>
#include <vector>

#include "knapformer/core/cost/step_time.h"
#include "tests/core/cases.h"
#include "tests/core/mixes.h"

namespace knapformer {
namespace {

TEST(Accumulation, RanksThatWaitInEachMicroBatchTakeTheSum) {
  Cases cases(1);
  for (int i = 0; i < 50; ++i) {
    StepInput input{.sequences = cases.input(true), .num_micro_batches = static_cast<int32_t>(cases.integer(1, 4))};
    input.sequences.cluster.fixed_s = 0.25;
    input.sequences.model.num_parameters = 1e6;
    const Plan plan = cases.any_step(input);
    const StepTime time = predict_step(plan);
    double sum_s = 0;
    for (const MicroBatchPlan& part : plan.plans()) sum_s += step_s(part);
    EXPECT_DOUBLE_EQ(time.total_s, sum_s);
    EXPECT_DOUBLE_EQ(std::accumulate(time.micro_batch_s.begin(), time.micro_batch_s.end(), 0.0), sum_s);
  }
}

TEST(Accumulation, RanksThatWaitOnceGoOnWhenTheyAreDone) {
  // Rank 0: 1000 tokens, then 10; rank 1: 10, then 1000. Waiting in each they take about 2000, waiting once 1010.
  StepInput input{
      .sequences = lengths_in({{1000, 10}, {10, 1000}}, "g2/1n1", 64), .num_micro_batches = 2, .sync = StepSync::kStep};
  use_block_clock(input.sequences);
  const auto blocks_s = [&](std::initializer_list<int64_t> lens) {
    double sum_s = 0;
    for (const int64_t l : lens)
      sum_s += input.sequences.workload.work(l, 64) / 400e12 * input.sequences.model.num_blocks;
    return sum_s;
  };
  const auto time_of = [&](int32_t degree_of_last) {
    std::vector<MicroBatchPlan> plans;
    const std::vector<int32_t> micro_batches = {0, 1, 0, 1};
    for (PlanInput& part : micro_batch_inputs(input, micro_batches)) {
      std::vector<Placement> placements;
      for (int32_t r = 0; r < 2; ++r) placements.push_back(at(0, r, 1));
      if (!plans.empty()) placements[1] = at(0, 0, degree_of_last);
      if (!plans.empty() && degree_of_last == 1) placements[1].first_rank = Rank(1);
      plans.emplace_back(std::move(part), "test", std::move(placements));
    }
    return predict_step(Plan(input, micro_batches, std::move(plans))).total_s;
  };
  EXPECT_NEAR(time_of(1), blocks_s({1000, 10}), 1e-12);
  // Shared, the last sequence starts when rank 0 is done with its first, and rank 1 has waited.
  EXPECT_GT(time_of(2), blocks_s({1000, 10}) + blocks_s({1000}) / 2);
  input.sync = StepSync::kMicroBatch;
  EXPECT_NEAR(time_of(1), blocks_s({1000, 1000}), 1e-12);
}

}  // namespace
}  // namespace knapformer
