// observe() against times made from a known gamma and speeds.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <utility>

#include "knapformer/torch/balancer.h"
#include "tests/core/cases.h"
#include "tests/torch/in_process_group.h"

namespace knapformer {
namespace {

double value_of(const StepMetrics& metrics, const std::string& name) {
  return std::visit([](auto value) { return static_cast<double>(value); }, metrics.at(name));
}

/// The busy seconds of each rank under a plan, where attention costs `gamma` and ranks are `speed` fast.
std::vector<double> busy_seconds(const MicroBatchPlan& plan, double gamma, const std::vector<double>& speed) {
  std::vector<double> seconds;
  for (size_t r = 0; r < speed.size(); ++r) {
    double work = 0;
    for (const int32_t c : plan.chunks_on(Rank(r))) {
      const Chunk& chunk = plan.chunk(c);
      const auto d = static_cast<double>(plan.input().d_model);
      const auto l = static_cast<double>(plan.seq_lens()[chunk.sequence]);
      work += 24 * static_cast<double>(chunk.num_tokens) * d * d + gamma * 4 * l * l * d / plan.degree_of(chunk);
    }
    seconds.push_back(3e-15 * work / speed[r]);
  }
  return seconds;
}

TEST(Observe, TeachesAllRanksTheSame) {
  constexpr int32_t kRanks = 4;
  const std::vector<double> speed = {1.2, 1.0, 1.0, 0.8};
  Cases cases(41);
  std::vector<SequenceLengths> steps;
  for (int i = 0; i < 60; ++i) {
    std::vector<std::vector<int64_t>> lists(kRanks);
    for (auto& list : lists) {
      for (int64_t n = cases.integer(1, 6); n > 0; --n) list.push_back(int64_t{1} << cases.integer(6, 13));
    }
    steps.push_back(SequenceLengths::from_lists(lists));
  }
  testing::InProcessWorld world(kRanks);
  std::vector<std::vector<double>> gammas(kRanks), speeds(kRanks);
  world.run_all([&](int32_t rank) {
    SequenceBalancer balancer("g2/1n2", {.plan = {.workload = {.gamma = 1.0}}}, world.all(rank), world.groups_of(rank));
    for (const SequenceLengths& step : steps) {
      const auto own = step.lens(Rank(rank));
      balancer.plan_routing(own, 64);
      const MicroBatchPlan& plan = balancer.plan();
      const auto r = static_cast<size_t>(rank);
      gammas[r].push_back(plan.input().workload.gamma);
      speeds[r] = plan.input().rank_speed;
      const double busy_s = busy_seconds(plan, 0.4, speed)[r];  // none where the plan leaves the rank idle
      if (busy_s > 0 && (rank != 3 || gammas[r].size() % 2 == 0)) balancer.observe(busy_s);
    }
    const StepMetrics m = balancer.metrics();
    EXPECT_NEAR(value_of(m, "gamma"), 0.4, 0.01);
    EXPECT_NEAR(value_of(m, "rank_speed"), speed[static_cast<size_t>(rank)], 0.01);
    EXPECT_GT(value_of(m, "given_model_error"), 0.05);
    EXPECT_LT(value_of(m, "learned_model_error"), 0.01);
  });
  EXPECT_EQ(gammas[0].front(), 1.0);
  for (int32_t rank = 1; rank < kRanks; ++rank) {
    EXPECT_EQ(gammas[static_cast<size_t>(rank)], gammas[0]);
    EXPECT_EQ(speeds[static_cast<size_t>(rank)], speeds[0]);
  }
}

TEST(Observe, GivenWorkLeavesGammaAsGiven) {
  SequenceBalancer balancer("g1n1", {.plan = {.workload = {.gamma = 1.0}}}, nullptr, {});
  for (int64_t step = 0; step < 60; ++step) {
    std::vector<int64_t> lens;
    std::vector<double> work;
    for (int64_t i = 0; i < 3; ++i) {
      const auto length = static_cast<double>(lens.emplace_back(64 + (37 * i + 911 * step) % 4096));
      work.push_back(24 * length * 64 * 64 + 4 * length * length * 64);
    }
    balancer.plan_routing(lens, 64, {.work = work});
    balancer.observe(busy_seconds(balancer.plan(), 0.4, {1.0})[0]);  // attention takes less than was given
  }
  EXPECT_EQ(value_of(balancer.metrics(), "gamma"), 1.0);
}

TEST(Observe, LearnsFromPlansThatCountAttentionForNothing) {
  SequenceBalancer balancer("g1n1", {.plan = {.workload = {.gamma = 1.0}}}, nullptr, {});
  SequenceBalancer other("g1n1", {.plan = {.workload = {.gamma = 0.0}}}, nullptr, {});  // a sampler's settings, say
  for (int64_t step = 0; step < 40; ++step) {
    const std::vector<int64_t> lens = {64 + (911 * step) % 4096, 64 + (3701 * step) % 16384};
    const MicroBatchPlan& plan = balancer.follow(balancer.step(*other.plan_routing(lens, 64)));
    balancer.observe(busy_seconds(plan, 0.4, {1.0})[0]);
    balancer.plan_routing(std::vector<int64_t>{64}, 64);
  }
  EXPECT_NEAR(value_of(balancer.metrics(), "gamma"), 0.4, 0.01);
}

TEST(Observe, IsHeardAlsoOfTheFirstOfManyMicroBatches) {
  SequenceBalancer balancer("g1n1", {.plan = {.workload = {.gamma = 1.0}}}, nullptr, {});
  for (int64_t step = 0; step < 20; ++step) {
    std::vector<int64_t> lens;
    for (int64_t i = 0; i < 100; ++i) lens.push_back(64 + (37 * i + 911 * step) % 4096);
    const auto planned = balancer.plan_routing(lens, 64, {.num_micro_batches = 100});
    for (int32_t micro_batch = 0; micro_batch < 100; ++micro_batch) {
      const double busy_s = busy_seconds(balancer.follow(balancer.step(*planned, micro_batch)), 0.4, {1.0})[0];
      if (micro_batch == 0 && busy_s > 0) balancer.observe(busy_s);  // it may be empty
    }
  }
  EXPECT_NEAR(value_of(balancer.metrics(), "gamma"), 0.4, 0.01);
}

TEST(Observe, IsOfAllMicroBatchesSinceTheLastTime) {
  for (const int64_t every : {1, 2, 4}) {
    SequenceBalancer balancer("g1n1", {.plan = {.workload = {.gamma = 1.0}}}, nullptr, {});
    for (int64_t step = 0; step < 40; ++step) {
      std::vector<int64_t> lens;
      for (int64_t i = 0; i < 8; ++i) lens.push_back(64 + (3701 * i + 911 * step) % 16384);
      const auto planned = balancer.plan_routing(lens, 64, {.num_micro_batches = 4});
      double busy_s = 0;
      for (int32_t micro_batch = 0; micro_batch < 4; ++micro_batch) {
        busy_s += busy_seconds(balancer.follow(balancer.step(*planned, micro_batch)), 0.4, {1.0})[0];
        if ((micro_batch + 1) % every == 0) balancer.observe(std::exchange(busy_s, 0));
      }
      balancer.plan_routing(std::vector<int64_t>{100'000}, 64);  // as for an evaluation, which nobody measures
    }
    EXPECT_NEAR(value_of(balancer.metrics(), "gamma"), 0.4, 0.01) << every;
  }
}

}  // namespace
}  // namespace knapformer
