// What the balanced solver reaches: how fast and how even its plans of training's batches are.
#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <numeric>

#include "tests/core/cases.h"
#include "tests/core/mixes.h"

namespace knapformer {
namespace {

struct Goal {
  const char* mix;
  double gamma;
  double at_default, at_low, exchanged_fraction;
};

class Goals : public testing::TestWithParam<Goal> {};

TEST_P(Goals, AreReachedOnTheMean) {
  const Goal goal = GetParam();
  constexpr int kSeeds = 12;
  double by_default = 0, low = 0, exchanged_fraction = 0, model = 0;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const PlanInput in = mix_input(goal.mix, "g8/4/2/1n4", seed, goal.gamma);
    const MicroBatchPlan plan = balanced(in);
    plan.validate();
    by_default += strict_loss(std::array{plan}) / kSeeds;
    model += block_loss(plan) / kSeeds;
    low += strict_loss(std::array{balanced(in, {.moves = Effort::kLow})}) / kSeeds;
    exchanged_fraction += plan.attention_tokens_moved() / static_cast<double>(plan.num_tokens()) / kSeeds;
  }
  EXPECT_LE(by_default, goal.at_default);
  EXPECT_LE(model, by_default * (1 + 1e-9));
  EXPECT_LE(low, goal.at_low);
  EXPECT_LE(exchanged_fraction, goal.exchanged_fraction);
}

INSTANTIATE_TEST_SUITE_P(Mixes, Goals,
                         testing::Values(Goal{"mixed", 0.41, 1.075, 1.080, 0.47},
                                         Goal{"mixed", 1.0, 1.070, 1.075, 0.47},
                                         Goal{"joint", 0.41, 1.083, 1.090, 0.47},
                                         Goal{"joint", 1.0, 1.066, 1.070, 0.47}, Goal{"low", 0.41, 1.005, 1.005, 0.0},
                                         Goal{"low", 1.0, 1.005, 1.005, 0.0}));

TEST(BalancedSolver, FlatBagsComeOutEvenWhereExchangesAreFree) {
  double joint_g4 = 0, joint_g8 = 0, a_g8 = 0, a_g4 = 0, greedy = 0, a_greedy = 0;
  constexpr int kSeeds = 20;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const auto mean_of = [&](PlanInput in, std::string_view solver) {
      in.cluster.node_bytes_per_s = std::numeric_limits<double>::infinity();
      return plan_micro_batch(in, solver).balance_after().max_over_mean() / kSeeds;
    };
    joint_g4 += mean_of(mix_input("joint", "g4n8", seed, 1.0), "balanced");
    joint_g8 += mean_of(mix_input("joint", "g8n4", seed, 1.0), "balanced");
    greedy += mean_of(mix_input("joint", "g4n8", seed, 1.0), "greedy");
    PlanInput a = mix_input("joint", "g8n4", seed, 1.0);
    a.seq_lens = five_lengths(seed, 32, 2);
    a_g8 += mean_of(a, "balanced");
    a.topology = Topology::parse("g4n8", 32);
    a_g4 += mean_of(a, "balanced");
    a_greedy += mean_of(a, "greedy");
  }
  EXPECT_LE(joint_g4, 1.0002);
  EXPECT_LE(joint_g8, 1.0002);
  EXPECT_LE(a_g8, 1.0002);
  EXPECT_GE(greedy, 1.0006);
  EXPECT_LE((a_g4 - 1) / (a_greedy - 1), 0.7);
}

TEST(BalancedSolver, ALimitOfTokensCostsLittle) {
  constexpr int kSeeds = 8;
  double unlimited = 0, loose = 0, closer = 0, tight = 0;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    PlanInput in = mix_input("joint", "g8/4/2/1n4", seed, 1.0);
    const auto lens = in.seq_lens.lens();
    const double mean = static_cast<double>(std::accumulate(lens.begin(), lens.end(), int64_t{0})) / 32;
    const auto loss_at = [&](double share_of_mean) {
      in.max_tokens_per_rank = static_cast<int64_t>(share_of_mean * mean);
      return block_loss(balanced(in)) / kSeeds;
    };
    unlimited += loss_at(100);
    loose += loss_at(1.3);
    closer += loss_at(1.2);
    tight += loss_at(1.05);
  }
  // Sharing everything (g8n4) takes 1.111.
  EXPECT_LE(unlimited, 1.057);
  EXPECT_LE(loose, 1.069);
  EXPECT_LE(closer, 1.088);
  EXPECT_LE(tight, 1.107);
}

TEST(BalancedSolver, MoreEffortIsNotWorse) {
  for (uint64_t seed = 0; seed < 6; ++seed) {
    for (const char* topology : {"g8/4/2/1n4", "g4n8", "g8n4"}) {
      const PlanInput in = mix_input("joint", topology, seed, 1.0);
      double least_s = std::numeric_limits<double>::infinity();
      for (const int64_t effort : {Effort::kLow, Effort::kDefault, Effort::kHigh}) {
        const double time_s = step_s(balanced(in, {.moves = effort}));
        EXPECT_LE(time_s, least_s * 1.001) << topology << ", seed " << seed;  // tokens do not divide evenly
        least_s = std::min(least_s, time_s);
      }
    }
  }
}

TEST(BalancedSolver, WithExchangesFreeWorkIsEven) {
  PlanInput in = mix_input("joint", "g8/4/2/1n4", 0, 1.0);
  in.cluster.node_bytes_per_s = std::numeric_limits<double>::infinity();
  for (uint64_t seed = 0; seed < 8; ++seed) {
    for (const char* mix : {"mixed", "joint", "low"}) {
      in.seq_lens = mix_input(mix, "g8/4/2/1n4", seed, 1.0).seq_lens;
      EXPECT_LE(balanced(in).balance_after().max_over_mean(), 1.005) << mix << ", seed " << seed;
    }
    in.seq_lens = five_lengths(seed, 32, 2);
    EXPECT_LE(balanced(in).balance_after().max_over_mean(), 1.005) << "A, seed " << seed;
  }
}

TEST(BalancedSolver, FasterRanksGetMore) {
  PlanInput in = lengths_in({8, std::vector<int64_t>(16, 500)}, "g8/4/2/1n1", 3072);
  in.rank_speed = {2, 2, 1, 1, 1, 1, 1, 1};
  const MicroBatchPlan plan = balanced(in);
  EXPECT_LE(block_loss(plan), 1.06);
  EXPECT_GE(plan.tokens_after()[0], plan.tokens_after()[7] * 18 / 10);
}

TEST(BalancedSolver, SpeedsOfAnyScale) {
  PlanInput in;
  in.seq_lens = five_lengths(1, 8, 2);
  in.topology = Topology::parse("g8/4/2/1n1", 8);
  in.d_model = 3072;
  use_block_clock(in);
  in.cluster.node_bytes_per_s = in.cluster.network_bytes_per_s = std::numeric_limits<double>::infinity();
  const double time_s = predict_micro_batch(balanced(in)).blocks_s();
  for (const double speed : {1e-18, 1e-12, 1e18}) {
    in.rank_speed.assign(8, speed);
    const MicroBatchPlan plan = balanced(in);
    plan.validate();
    EXPECT_NEAR(predict_micro_batch(plan).blocks_s() * speed, time_s, time_s * 0.01);
    EXPECT_GE(prediction_of(plan).gap(), 0);
    EXPECT_LT(prediction_of(plan).gap(), 0.05);
  }
}

}  // namespace
}  // namespace knapformer
