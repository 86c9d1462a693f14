// The plans of the published method's own implementation: see tests/golden/README.md.
#include <gtest/gtest.h>

#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "knapformer/core/planners/planner.h"
#include "tests/core/cases.h"

namespace knapformer {
namespace {

struct Golden {
  nlohmann::json json;
  PlanInput input;
};

std::vector<Golden> golden_plans() {
  std::ifstream file(GOLDEN_DIR "/reference_plans.jsonl");
  std::vector<Golden> plans;
  for (std::string line; std::getline(file, line);) {
    nlohmann::json golden = nlohmann::json::parse(line);
    const auto seq_lens = golden["seq_lens"].get<std::vector<std::vector<int64_t>>>();
    PlanInput input{
        .seq_lens = SequenceLengths::from_lists(seq_lens),
        .topology = Topology::parse(golden["topology"].get<std::string>(), static_cast<int64_t>(seq_lens.size())),
        .d_model = golden["d_model"].get<int64_t>(),
        .workload = {.gamma = golden["gamma"].get<double>()}};
    plans.push_back({.json = std::move(golden), .input = std::move(input)});
  }
  return plans;
}

TEST(GoldenPlans, GreedyMakesEveryOneOfThem) {
  const std::vector<Golden> plans = golden_plans();
  ASSERT_EQ(plans.size(), 72) << "in " GOLDEN_DIR;
  for (const auto& [golden, input] : plans) {
    SCOPED_TRACE(golden["name"].get<std::string>());
    const MicroBatchPlan plan = greedy(input);
    plan.validate();
    std::vector<int32_t> bags;
    for (const Placement& p : plan.placements()) bags.push_back(p.bag.value);
    EXPECT_EQ(bags, golden["bag_of_sequence"].get<std::vector<int32_t>>());

    const auto before = golden["workload_before"].get<std::vector<double>>(),
               after = golden["workload_after"].get<std::vector<double>>();
    for (size_t r = 0; r < before.size(); ++r)
      EXPECT_NEAR(plan.workload_before()[r] / 1e12, before[r], 1e-9 * before[r]);
    for (const Bag& bag : plan.topology().bags()) {
      double ours = 0, theirs = 0;
      for (int32_t i = 0; i < bag.num_ranks; ++i) {
        ours += plan.workload_after()[bag.first_rank.index() + static_cast<size_t>(i)] / 1e12;
        theirs += after[bag.first_rank.index() + static_cast<size_t>(i)];
      }
      EXPECT_NEAR(ours, theirs, 1e-9 * theirs);
    }
  }
}

TEST(Greedy, RemainingCapacityDecidesAmongBagsOfSeveralSizes) {
  // A bag's capacity is 40 tokens a rank. In the end 5, 10 and 0 are left: of 40, the last sequence would take 15.
  const auto bags_of = [](std::string_view topology, std::string_view solver) {
    PlanInput in = lengths_in({{35, 30}, {28, 27}, {25, 15}, {}}, topology, 64);
    in.workload.gamma = 0;
    std::vector<int32_t> bags;
    const MicroBatchPlan plan = plan_micro_batch(in, solver);
    for (const Placement& place : plan.placements()) bags.push_back(place.bag.value);
    return bags;
  };
  EXPECT_EQ(bags_of("g1n2+g2n1", "greedy"), (std::vector<int32_t>{0, 1, 2, 2, 2, 1}));
  EXPECT_EQ(bags_of("g1n2+g2n1", "greedy_remaining"), (std::vector<int32_t>{0, 1, 2, 2, 2, 2}));
  EXPECT_EQ(bags_of("g1n4", "greedy_remaining"), bags_of("g1n4", "greedy"));
}

TEST(GoldenPlans, BalancedIsNeverSlower) {
  int num_better = 0;
  for (auto& [golden, input] : golden_plans()) {
    SCOPED_TRACE(golden["name"].get<std::string>());
    const double greedy_s = predict_micro_batch(greedy(input)).blocks_s();
    for (const int64_t effort : {Effort::kLow, Effort::kDefault}) {
      const MicroBatchPlan plan = balanced(input, {.moves = effort});
      plan.validate();
      EXPECT_LE(predict_micro_batch(plan).blocks_s(), greedy_s);
      num_better += predict_micro_batch(plan).blocks_s() < 0.999 * greedy_s;
    }
  }
  EXPECT_GE(num_better, 15);
}

}  // namespace
}  // namespace knapformer
