// The plans of the published method's own implementation: see tests/golden/README.md.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "knapformer/core/planner.h"

namespace knapformer {
namespace {

TEST(GoldenPlans, GreedyMakesEveryOneOfThem) {
  std::ifstream file(GOLDEN_DIR "/reference_plans.jsonl");
  ASSERT_TRUE(file) << "no golden plans at " GOLDEN_DIR;
  int num_plans = 0;
  for (std::string line; std::getline(file, line); ++num_plans) {
    const auto golden = nlohmann::json::parse(line);
    SCOPED_TRACE(golden["name"].get<std::string>());
    const auto seq_lens = golden["seq_lens"].get<std::vector<std::vector<int64_t>>>();
    const PlanInput input{
        .seq_lens = SequenceLengths::from_lists(seq_lens),
        .topology = Topology::parse(golden["topology"].get<std::string>(), static_cast<int64_t>(seq_lens.size())),
        .d_model = golden["d_model"].get<int64_t>(),
        .workload = {.gamma = golden["gamma"].get<double>()}};
    const Plan plan = plan_greedy(input);
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
  EXPECT_EQ(num_plans, 72);
}

}  // namespace
}  // namespace knapformer
