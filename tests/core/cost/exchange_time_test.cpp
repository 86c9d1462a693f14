#include "knapformer/core/cost/exchange_time.h"

#include <gtest/gtest.h>

#include "tests/core/cases.h"

namespace knapformer {
namespace {

TEST(ExchangeTime, SentPartsFollowNodesAndHeads) {
  const Cluster cluster{.ranks_per_node = 2};
  const auto expect_part = [&](int32_t num_heads, int32_t rank, int32_t first, int32_t degree, double inside,
                               double between) {
    const AttentionShares shares(num_heads, 0);
    const SentColumns sent = sent_columns(cluster, shares, Rank(rank), Rank(first), degree, 0);
    for (const Traffic& part : {sent.query, sent.key}) {
      EXPECT_DOUBLE_EQ(part.inside, inside);
      EXPECT_DOUBLE_EQ(part.between, between);
    }
  };
  expect_part(0, 0, 0, 1, 0, 0);
  expect_part(0, 0, 0, 2, 0.5, 0);
  expect_part(0, 1, 1, 2, 0, 0.5);  // ranks 1 and 2 are in two nodes
  expect_part(0, 5, 4, 4, 0.25, 0.5);
  // 3 heads over 2 ranks: 2 and 1, so the first sends a third and the second two thirds.
  expect_part(3, 0, 0, 2, 1 / 3.0, 0);
  expect_part(3, 1, 0, 2, 2 / 3.0, 0);
}

TEST(ExchangeTime, BytesAreThoseOfEveryChunkToEveryPeer) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    Cases cases(seed);
    PlanInput in = cases.input(true, 500);
    const auto node = in.cluster.ranks_per_node = static_cast<int32_t>(cases.integer(1, 5));
    in.model.num_heads = seed % 3 == 0 ? static_cast<int32_t>(cases.integer(1, 12)) : 0;
    if (seed % 2 == 0) cases.cut_attention(in);
    const MicroBatchPlan plan = cases.any_plan(in);
    const Passes passes = in.model.passes();
    const double row = static_cast<double>(in.d_model) * in.model.element_size;
    double route = 0, route_between = 0, attention = 0, attention_between = 0;
    for (const Chunk& chunk : plan.chunks()) {
      const auto tokens = static_cast<double>(chunk.num_tokens);
      const int32_t rank = chunk.rank.value, home = plan.seq_lens().home_of(chunk.sequence).value;
      if (rank != home) {
        const double bytes = tokens * (row + in.model.side_bytes_per_token) * passes.routes;
        route += bytes;
        if (rank / node != home / node) route_between += bytes;
      }
      const Placement& place = plan.placement(chunk.sequence);
      for (int32_t i = 0; i < place.degree; ++i) {
        const int32_t peer = place.first_rank.value + i;
        if (peer == rank) continue;
        // q and o go where their part of the queries is computed, k and v to the parts that see them.
        const int32_t num_parts = in.attention_cut(place.degree).num_parts, head_parts = place.degree / num_parts;
        const HeadPartition shares =
            partition_heads(in.model.num_heads == 0 ? head_parts : in.model.num_heads,
                            in.model.num_heads == 0 ? head_parts : in.model.num_heads, head_parts);
        const double heads = static_cast<double>(shares.query.of(i % head_parts).size()) / shares.query.num_heads;
        const QueryPart part = plan.query_parts(chunk.sequence)[static_cast<size_t>(i / head_parts)];
        double rows = 0;
        for (int64_t t = chunk.first_token; t < chunk.first_token + chunk.num_tokens; ++t) {
          rows += t >= part.first_query && t < part.first_query + part.num_queries ? 2 : 0;
          rows += t >= part.first_key && t < part.first_key + part.num_keys ? 2 : 0;
        }
        const double bytes = rows * row * passes.exchanges() * in.model.num_blocks * heads;
        attention += bytes;
        if (peer / node != rank / node) attention_between += bytes;
      }
    }
    const MicroBatchTime step = predict_micro_batch(plan);
    EXPECT_NEAR(route, step.route_bytes.total(), 1e-9 * route);
    EXPECT_NEAR(route_between, step.route_bytes.between, 1e-9 * route);
    EXPECT_NEAR(attention, step.attention_bytes.total(), 1e-9 * attention);
    EXPECT_NEAR(attention_between, step.attention_bytes.between, 1e-9 * attention);
  }
}

}  // namespace
}  // namespace knapformer
