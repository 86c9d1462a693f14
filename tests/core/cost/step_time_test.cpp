#include "knapformer/core/cost/step_time.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "knapformer/core/util/error.h"
#include "tests/core/cases.h"

namespace knapformer {
namespace {

constexpr int64_t kWidth = 64;

/// Round numbers, so that a reader can check each expectation by hand: 1 GFLOP/s, 1 MB/s inside, 0.25 MB/s between, no
/// latency, nothing fixed, nodes of 2.
Cluster round_hardware() {
  Cluster hw;
  hw.overlaps_attention = false;
  hw.flops_per_s = 1e9;
  hw.ranks_per_node = 2;
  hw.node_bytes_per_s = 1e6;
  hw.network_bytes_per_s = 0.25e6;
  hw.node_latency_s = hw.network_latency_s = hw.fixed_s = 0;
  return hw;
}

TrainedModel small_model() {
  TrainedModel model;
  model.num_blocks = 3;
  model.num_parameters = 0;
  return model;
}

PlanInput input_of(const std::vector<std::vector<int64_t>>& lens, const char* topology) {
  PlanInput in = lengths_in(lens, topology, kWidth);
  in.workload.gamma = 0.5;
  return in;
}

/// The step of the same plan on this cluster, of this model.
MicroBatchTime predict_on(const MicroBatchPlan& plan, const Cluster& cluster, const TrainedModel& model,
                          std::span<const RankCompute> measured = {}) {
  PlanInput input = plan.input();
  input.cluster = cluster;
  input.model = model;
  return predict_micro_batch(
      MicroBatchPlan(input, "test", {plan.placements().begin(), plan.placements().end()}, plan.chunk_lens()), measured);
}

double token_s(double tokens) { return 24 * tokens * kWidth * kWidth / 1e9; }
double attention_s(double len) { return 0.5 * 4 * len * len * kWidth / 1e9; }

TEST(MicroBatchTime, WithoutBalancerIsTheSlowestRanksCompute) {
  const MicroBatchPlan home = plan_home(input_of({{100, 50}, {300}, {}, {20}}, "g4n1"));
  home.validate();
  EXPECT_EQ(home.tokens_moved(), 0);
  EXPECT_TRUE(std::ranges::equal(home.workload_after(), home.workload_before()));
  const MicroBatchTime step = predict_on(home, round_hardware(), small_model());
  // 3 blocks; forward, recompute and a backward of two forwards.
  EXPECT_DOUBLE_EQ(step.token_s, 3 * 4 * token_s(300));
  EXPECT_DOUBLE_EQ(step.attention_s, 3 * 4 * attention_s(300));
  EXPECT_DOUBLE_EQ(step.total_s(), step.token_s + step.attention_s);
  EXPECT_EQ(step.route_bytes.total(), 0);
  EXPECT_EQ(step.attention_bytes.total(), 0);
  const double work_s = token_s(470) + attention_s(100) + attention_s(50) + attention_s(300) + attention_s(20);
  EXPECT_DOUBLE_EQ(step.ideal_s, 3 * 4 * work_s / 4);

  TrainedModel no_recompute = small_model();
  no_recompute.recomputes = false;
  EXPECT_DOUBLE_EQ(predict_on(home, round_hardware(), no_recompute).token_s, 3 * 3 * token_s(300));
}

TEST(MicroBatchTime, StaticSharingKeepsSequencesInTheirHomeBag) {
  const PlanInput input = input_of({{100, 50}, {300}, {}, {20}}, "g2n2");
  const MicroBatchPlan home = plan_home_bags(input);
  home.validate();
  EXPECT_EQ(home.tokens_after()[0] + home.tokens_after()[1], 450);
  EXPECT_EQ(home.tokens_after()[2] + home.tokens_after()[3], 20);
  for (const Placement& placement : home.placements()) EXPECT_EQ(placement.degree, 2);
  // The first bag's two ranks share all that they drew, evenly.
  const MicroBatchTime step = predict_on(home, round_hardware(), small_model());
  EXPECT_DOUBLE_EQ(step.token_s, 3 * 4 * token_s(225));
  EXPECT_DOUBLE_EQ(step.attention_s, 3 * 4 * (attention_s(100) + attention_s(50) + attention_s(300)) / 2);
  EXPECT_THROW(plan_home_bags(input_of({{100}, {300}}, "g2/1n1")), ArgumentError);
}

TEST(MicroBatchTime, MeasuredComputeTakesTheModelsPlace) {
  const MicroBatchPlan plan(input_of({{100}, {40}, {30}}, "g1n1+g2n1"), "test",
                            {at(1, 1, 2), at(1, 1, 2), at(0, 0, 1)});
  const MicroBatchTime modelled = predict_on(plan, round_hardware(), small_model());
  // Ranks 1 and 2 wait for each other between the phases: 5 + 4, though neither computes longer than 6.
  const std::vector<RankCompute> measured = {{3, 1, 0}, {5, 0, 1}, {2, 0, 4}};
  const MicroBatchTime step = predict_on(plan, round_hardware(), small_model(), measured);
  EXPECT_DOUBLE_EQ(step.token_s, 3 * 4 * 5);
  EXPECT_DOUBLE_EQ(step.attention_s, 3 * 4 * 4);
  EXPECT_DOUBLE_EQ(step.ideal_s, 3 * 4 * (4 + 6 + 6) / 3.0);
  EXPECT_DOUBLE_EQ(step.route_s, modelled.route_s);
  EXPECT_EQ(step.attention_bytes.total(), modelled.attention_bytes.total());

  EXPECT_THROW(predict_on(plan, round_hardware(), small_model(), std::span(measured).first(2)), ArgumentError);
  const std::vector<RankCompute> negative = {{3, 1, 0}, {5, -1, 1}, {2, 0, 4}};
  EXPECT_THROW(predict_on(plan, round_hardware(), small_model(), negative), ArgumentError);
}

TEST(MicroBatchTime, ASharedSequenceSpreadsItsWorkAndPaysForExchanges) {
  // One sequence of 100 tokens over 4 ranks in nodes of 2: 25 tokens a rank, a quarter of the attention each.
  const MicroBatchPlan plan(input_of({{100}, {}, {}, {}}, "g4n1"), "test", {at(0, 0, 4)});
  const MicroBatchTime step = predict_on(plan, round_hardware(), small_model());
  EXPECT_DOUBLE_EQ(step.token_s, 3 * 4 * token_s(25));
  EXPECT_DOUBLE_EQ(step.attention_s, 3 * 4 * attention_s(100) / 4);
  // To each of 3 peers a quarter of the columns of 25 rows, 2 bytes each, q, k, v and o: one peer in the node, two
  // beyond.
  const double bytes_per_peer = 4 * 25 * (kWidth / 4.0) * 2;
  EXPECT_DOUBLE_EQ(step.exchange_s, 3 * 3 * (2 * bytes_per_peer / 0.25e6));
  EXPECT_DOUBLE_EQ(step.attention_bytes.total(), 3 * 3 * 4 * 3 * bytes_per_peer);
  EXPECT_DOUBLE_EQ(step.attention_bytes.between, 3 * 3 * 4 * 2 * bytes_per_peer);
  // Rank 0 sends 25 tokens to rank 1 and 50 out of its node; there and back, and the gradients of both.
  EXPECT_DOUBLE_EQ(step.route_bytes.total(), 4 * 75 * kWidth * 2);
  EXPECT_DOUBLE_EQ(step.route_bytes.between, 4 * 50 * kWidth * 2);
  EXPECT_DOUBLE_EQ(step.route_s, 4 * 50 * kWidth * 2 / 0.25e6);
}

TEST(MicroBatchTime, AConnectedGroupTakesItsLongestPhases) {
  // Rank 0 has many tokens, rank 1 much attention; they share a short sequence, so each waits for the other.
  const auto plan_with = [](int32_t degree) {
    return MicroBatchPlan(input_of({{4}, std::vector<int64_t>(10, 40), {300}, {}}, "g4/2/1n1"), "test", [&] {
      std::vector<Placement> placements = {at(0, 0, degree)};
      for (int i = 0; i < 10; ++i) placements.push_back(at(0, 0, 1));
      placements.push_back(at(0, 1, 1));
      return placements;
    }());
  };
  Cluster hw = round_hardware();
  hw.node_bytes_per_s = 1e15;  // exchanges as good as free
  const MicroBatchTime apart = predict_on(plan_with(1), hw, small_model());
  const MicroBatchTime together = predict_on(plan_with(2), hw, small_model());
  EXPECT_NEAR(together.token_s, 3 * 4 * token_s(402), 1e-12);
  EXPECT_NEAR(together.attention_s, 3 * 4 * (attention_s(300) + attention_s(4) / 2), 1e-12);
  EXPECT_GT(together.token_s + together.attention_s, apart.token_s + apart.attention_s);
  EXPECT_EQ(together.ranks[0].group, Rank(0));
  EXPECT_EQ(together.ranks[1].group, Rank(0));
  EXPECT_EQ(together.ranks[2].group, Rank(2));
  EXPECT_EQ(apart.ranks[1].group, Rank(1));
  EXPECT_DOUBLE_EQ(together.ranks[0].block_s, together.ranks[1].block_s);
  EXPECT_LT(together.ranks[2].block_s, together.ranks[1].block_s);
}

TEST(MicroBatchTime, WhatIsWholeHidesWhatTravels) {
  const MicroBatchPlan plan(input_of({{64, 500}, {}}, "g2/1n1"), "test", {at(0, 0, 2), at(0, 0, 1)});
  Cluster hw = round_hardware();
  const MicroBatchTime exposed = predict_on(plan, hw, small_model());
  hw.overlaps_attention = true;
  const MicroBatchTime hidden = predict_on(plan, hw, small_model());
  const double pre_s = 3 * 32 * (kWidth / 2.0) * 2 / 1e6;
  ASSERT_LT(pre_s, attention_s(500));
  // In forward, recompute and backward.
  EXPECT_NEAR(exposed.total_s() - hidden.total_s(), 3 * 3 * pre_s, 1e-12);
  EXPECT_DOUBLE_EQ(hidden.ranks[0].forward.hidden_s, pre_s);
  EXPECT_DOUBLE_EQ(hidden.ranks[0].backward.hidden_s, pre_s);
  EXPECT_EQ(hidden.ranks[1].forward.hidden_s, 0);  // nothing is whole there
}

TEST(MicroBatchTime, FsdpShowsOnlyWhatTheBlocksDoNotHide) {
  Cluster hw = round_hardware();
  TrainedModel model = small_model();
  model.shard_ranks = 4;
  const auto fsdp_s = [&](int64_t len, double num_parameters) {
    model.num_parameters = num_parameters;
    return predict_on(plan_home(input_of({{len}, {len}, {len}, {len}}, "g1n4")), hw, model).fsdp_s;
  };
  // A block's parameters: half of them lie in the other node, whose two adapters bring 0.5 MB/s. First gather, last
  // reduction.
  const double parameters = 3e4, block_bytes = 1e4 * 2;
  const double gather_s = std::max(block_bytes * 3 / 4 / 1e6, block_bytes / 2 / 0.5e6);
  EXPECT_DOUBLE_EQ(fsdp_s(10'000, parameters), 2 * gather_s);
  // Nothing to hide behind: 3 gathers in forward, 3 in backward (one before any compute of its own), 3 reductions.
  const double forward_s = token_s(1) + attention_s(1);
  EXPECT_NEAR(fsdp_s(1, parameters), 2 * gather_s + 2 * ((gather_s - forward_s) + (2 * gather_s - 3 * forward_s)),
              1e-12);
  EXPECT_DOUBLE_EQ(fsdp_s(10'000, 0), 0);
}

TEST(MicroBatchTime, FsdpGathersTwiceAndReducesOnce) {
  TrainedModel model = small_model();
  model.num_parameters = 1000;
  model.element_size = 2;
  const auto bytes = [&](int32_t shard_ranks, StepMode mode) {
    model.shard_ranks = shard_ranks;
    model.mode = mode;
    return predict_on(plan_home(input_of({{1}, {1}, {1}, {1}}, "g1n4")), round_hardware(), model).fsdp_bytes;
  };
  // Of four ranks each sends its quarter to three others, two gathers and a reduction.
  EXPECT_DOUBLE_EQ(bytes(4, StepMode::kTraining), 4 * 3 * (2000.0 / 4 * 3));
  EXPECT_DOUBLE_EQ(bytes(4, StepMode::kLora), 4 * 2 * (2000.0 / 4 * 3));
  EXPECT_DOUBLE_EQ(bytes(4, StepMode::kInference), 4 * 1 * (2000.0 / 4 * 3));
  // Two copies: within each, halves to one other; then an all-reduce of the half with the other copy, once there and
  // back.
  EXPECT_DOUBLE_EQ(bytes(2, StepMode::kTraining), 4 * (3 * 1000.0 + 2 * 1000.0 / 2));
  EXPECT_DOUBLE_EQ(bytes(1, StepMode::kTraining), 4 * 2 * 2000.0 * 3 / 4);
}

TEST(MicroBatchTime, HostCostCountsPieces) {
  Cluster hw = round_hardware();
  hw.host_s_per_piece = 1;
  const MicroBatchPlan plan(input_of({{100, 60, 7}, {}}, "g2/1n1"), "test", {at(0, 0, 2), at(0, 0, 2), at(0, 1, 1)});
  const MicroBatchTime step = predict_on(plan, hw, small_model());
  EXPECT_DOUBLE_EQ(step.host_s, 3 * 4);  // blocks; two chunks in two pieces each
  for (const RankTime& rank : step.ranks) EXPECT_DOUBLE_EQ(3 * rank.block_s, step.blocks_s());
}

/// Numbers small enough to work out by hand: width 1, 1 FLOP/s, one forward pass of one block: 24 s a token and 4 l^2 s
/// of attention.
PlanInput unit_input(const std::vector<std::vector<int64_t>>& lens, const char* topology) {
  PlanInput in = lengths_in(lens, topology, 1);
  in.workload.gamma = 1;
  in.cluster = {.flops_per_s = 1,
                .ranks_per_node = 2,
                .node_bytes_per_s = 2,
                .network_bytes_per_s = 0.5,
                .node_latency_s = 0,
                .network_latency_s = 0,
                .fixed_s = 0,
                .overlaps_attention = false};
  in.model = {.num_blocks = 1, .num_parameters = 0, .mode = StepMode::kInference};
  return in;
}

TEST(MicroBatchTime, UnevenChunksShareAttentionEvenlyAndExchangeByTheirTokens) {
  // Sequence 0 is cut 6 + 2 over both ranks, sequence 1 lies whole on rank 1.
  const MicroBatchPlan plan(unit_input({{8}, {5}}, "g2/1n1"), "any", {at(0, 0, 2), at(0, 1, 1)}, {6, 2, 5});
  const MicroBatchTime step = predict_micro_batch(plan);
  const double shared = 4 * 64 / 2.0, whole = 4 * 25;
  // 4 numbers of 2 bytes a token, half of which leave, at 2 bytes/s: 2 s a token.
  EXPECT_DOUBLE_EQ(step.ranks[0].forward.exchange_s(), 12);
  EXPECT_DOUBLE_EQ(step.ranks[1].forward.exchange_s(), 4);
  EXPECT_DOUBLE_EQ(step.blocks_s(), 24 * 7 + std::max(shared + 12, shared + whole + 4));
}

TEST(MicroBatchTime, GroupsAreConnectedThroughOthers) {
  // 0-1 and 2-3 share by twos; one of all four connects them.
  const MicroBatchPlan plan(unit_input({{4}, {4}, {4}, {9}}, "g4/2/1n1"), "any",
                            {at(0, 0, 2), at(0, 2, 2), at(0, 0, 4), at(0, 3, 1)});
  for (const RankTime& rank : predict_micro_batch(plan).ranks) EXPECT_EQ(rank.group, Rank(0));
}

TEST(MicroBatchTime, SpeedShortensComputeAndNotTheExchange) {
  PlanInput in = unit_input({{8}, {}}, "g2n1");
  in.rank_speed = {2, 1};
  const MicroBatchTime step = predict_micro_batch(MicroBatchPlan(in, "any", {at(0, 0, 2)}));
  EXPECT_DOUBLE_EQ(step.ranks[0].forward.token_s, 24 * 4 / 2.0);
  EXPECT_DOUBLE_EQ(step.ranks[0].forward.shared_attention_s, 4 * 64 / 2.0 / 2);
  EXPECT_DOUBLE_EQ(step.ranks[0].forward.exchange_s(), step.ranks[1].forward.exchange_s());
  EXPECT_DOUBLE_EQ(step.ideal_s, (24 * 8 + 4 * 64) / 3.0);
}

TEST(MicroBatchTime, LaterStagesOfKeysHideBehindAttention) {
  // One head on two ranks: each has half of the queries, and sends its half of k and v, in two stages.
  for (const double bytes_per_s : {1.0, 1e-3}) {
    PlanInput in = unit_input({{8}, {}}, "g2n1");
    in.model.num_heads = 1;
    in.cluster.node_bytes_per_s = bytes_per_s;
    const MicroBatchTime at_once = predict_micro_batch([&] {
      in.attention_cuts = {{.degree = 2, .num_parts = 2}};
      return MicroBatchPlan(in, "any", {at(0, 0, 2)});
    }());
    in.attention_cuts = {{.degree = 2, .num_parts = 2, .num_stages = 2}};
    const PassTime staged = predict_micro_batch(MicroBatchPlan(in, "any", {at(0, 0, 2)})).ranks[0].forward;
    const PassTime whole = at_once.ranks[0].forward;
    EXPECT_DOUBLE_EQ(staged.shared_attention_s, 1.02 * whole.shared_attention_s);
    EXPECT_DOUBLE_EQ(staged.pre_attn_s, whole.pre_attn_s);
    EXPECT_DOUBLE_EQ(staged.post_attn_s, 0);  // queries stay where they are
    EXPECT_EQ(whole.hidden_s, 0);
    EXPECT_DOUBLE_EQ(staged.hidden_s, std::min(whole.pre_attn_s / 2, whole.shared_attention_s / 2));
  }
}

TEST(MicroBatchTime, ARankHasTheAttentionOfItsHeads) {
  // 12 heads over 8 ranks: four have 2, four have 1.
  PlanInput in = unit_input(std::vector<std::vector<int64_t>>(8, {80}), "g8n1");
  std::vector<Placement> placements(8, at(0, 0, 8));
  const double even_s = predict_micro_batch(MicroBatchPlan(in, "any", placements)).attention_s;
  in.model.num_heads = 12;
  const MicroBatchPlan plan(in, "any", placements);
  const MicroBatchTime uneven = predict_micro_batch(plan);
  EXPECT_NEAR(uneven.attention_s, even_s * 8 * 2 / 12, 1e-9);
  EXPECT_NEAR(uneven.ranks[0].forward.shared_attention_s, 2 * uneven.ranks[7].forward.shared_attention_s, 1e-9);
  EXPECT_DOUBLE_EQ(plan.workload_after()[0] - plan.workload_after()[7], 4.0 * 8 * 80 * 80 / 12);
  in.model.num_kv_heads = 4;  // 8 ranks, 4 key/value heads: query heads divide on their own
  EXPECT_DOUBLE_EQ(predict_micro_batch(MicroBatchPlan(in, "any", placements)).attention_s, uneven.attention_s);
}

TEST(MicroBatchTime, IsFiniteOnTheSlowestCluster) {
  constexpr double kMin = 1 / kMaxMagnitude;
  const MicroBatchPlan plan({.seq_lens = SequenceLengths::from_lists({{SequenceLengths::kMaxSequenceTokens}, {}}),
                             .topology = Topology::parse("g2n1"),
                             .d_model = 1 << 24,
                             .workload = {.gamma = kMaxMagnitude},
                             .cluster = {.flops_per_s = kMin, .node_bytes_per_s = kMin, .network_bytes_per_s = kMin},
                             .model = {.num_blocks = 1 << 20, .num_parameters = kMaxMagnitude, .element_size = 16}},
                            "any", {at(0, 0, 2)});
  plan.input().validate();
  EXPECT_TRUE(std::isfinite(step_s(plan)));
  EXPECT_TRUE(std::isfinite(prediction_of(plan).gap()));
}

TEST(MicroBatchTime, AdaptersOnAFrozenBaseNeedNoGradientsOfIt) {
  const MicroBatchPlan plan(input_of({{100}, {40}}, "g2n1"), "any", {at(0, 0, 2), at(0, 0, 2)});
  TrainedModel model = small_model();
  const MicroBatchTime full = predict_on(plan, round_hardware(), model);
  model.mode = StepMode::kLora;
  const MicroBatchTime lora = predict_on(plan, round_hardware(), model);
  EXPECT_DOUBLE_EQ(lora.token_s, full.token_s * 3 / 4);
  EXPECT_DOUBLE_EQ(lora.attention_s, full.attention_s);
  EXPECT_DOUBLE_EQ(lora.exchange_s, full.exchange_s);
  model.mode = StepMode::kInference;
  const MicroBatchTime inference = predict_on(plan, round_hardware(), model);
  EXPECT_DOUBLE_EQ(inference.token_s, full.token_s / 4);
  EXPECT_DOUBLE_EQ(inference.exchange_s, full.exchange_s / 3);
  EXPECT_DOUBLE_EQ(inference.route_s, full.route_s / 2);
}

TEST(MicroBatchTime, AStepTakesWhatItsSlowestReplicaTakes) {
  const PlanInput in = input_of({{100}, {}, {300}, {}}, "g2n1");
  const MicroBatchPlan plan(in, "any", {at(0, 0, 2), at(1, 2, 2)});
  const MicroBatchTime step = predict_on(plan, round_hardware(), small_model());
  ASSERT_EQ(step.replica_block_s.size(), 2u);
  EXPECT_LT(step.replica_block_s[0], step.replica_block_s[1]);
  EXPECT_DOUBLE_EQ(step.blocks_s(), 3 * step.replica_block_s[1]);
}

}  // namespace
}  // namespace knapformer
