// SequenceBalancer::attention over flat and nested bags, on ranks that are threads. The oracle is attention over each
// whole sequence with all heads, computed on its own from values that follow from (sequence, token).
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <limits>

#include "knapformer/torch/balancer.h"
#include "tests/core/cases.h"
#include "tests/core/masks.h"
#include "tests/torch/in_process_group.h"

namespace knapformer {
namespace {

using testing::InProcessWorld;

constexpr int64_t kDim = 3;

struct AttentionCase {
  std::string topology;
  int32_t num_ranks = 1;
  int64_t num_heads = 8, num_kv_heads = 8;
  ExchangeEngine engine = ExchangeEngine::kCpu;
  const char* mask = "";                // where ranks share queries, too: that of all sequences
  std::vector<AttentionCut> cuts = {};  // in place of the planner's

  bool cuts_queries() const { return *mask != 0; }
  TrainedModel model() const {
    if (!cuts_queries()) return {};
    return {.num_heads = static_cast<int32_t>(num_heads),
            .num_kv_heads = static_cast<int32_t>(num_kv_heads),
            .cuts_queries = true};
  }
  Mask mask_of() const { return Mask::parse(cuts_queries() ? mask : "full"); }
};

void PrintTo(const AttentionCase& setup, std::ostream* out) { *out << setup.topology; }

std::vector<int64_t> to_longs(const at::Tensor& lens) {
  const at::Tensor longs = lens.to(at::kLong);
  return {longs.const_data_ptr<int64_t>(), longs.const_data_ptr<int64_t>() + longs.numel()};
}

/// softmax(q k^T) v of every sequence and head; k and v as many heads as q or a divisor. The first key is that of the
/// sequence, but with a window, for which distances are enough.
at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const SequenceRows& rows,
                  const Mask& mask) {
  const int64_t group = k.size(1) == 0 ? 1 : q.size(1) / k.size(1);
  const std::vector<int64_t> query_lens = to_longs(rows.query_lens), key_lens = to_longs(rows.key_lens);
  const std::vector<int64_t> starts = to_longs(rows.query_starts);
  std::vector<at::Tensor> outputs;
  int64_t first_query = 0, first_key = 0;
  for (size_t s = 0; s < query_lens.size(); ++s) {
    const int64_t num_queries = query_lens[s], num_keys = key_lens[s];
    const auto part = [&](const at::Tensor& t, int64_t first, int64_t length, int64_t repeats) {
      return t.narrow(0, first, length).transpose(0, 1).repeat_interleave(repeats, 0);  // (heads, tokens, dim)
    };
    at::Tensor hidden = at::zeros({num_queries, num_keys}, at::kBool);
    for (int64_t i = 0; i < num_queries; ++i) {
      for (int64_t j = 0; j < num_keys; ++j) hidden[i][j].fill_(!sees(mask, starts[s] + i, j));
    }
    const at::Tensor scores =
        at::matmul(part(q, first_query, num_queries, 1), part(k, first_key, num_keys, group).transpose(1, 2));
    const at::Tensor weights = scores.masked_fill(hidden, -std::numeric_limits<double>::infinity()).softmax(-1);
    outputs.push_back(at::matmul(weights, part(v, first_key, num_keys, group)).transpose(0, 1));
    first_query += num_queries;
    first_key += num_keys;
  }
  EXPECT_EQ(q.size(0), first_query);
  EXPECT_EQ(k.size(0), first_key);
  return outputs.empty() ? at::empty({0, q.size(1), kDim}, q.options()) : at::cat(outputs);
}

/// q, k, v, and the weights of a loss, of a whole sequence.
struct Sequence {
  std::vector<at::Tensor> qkv;
  at::Tensor weight;
  at::Tensor o;
};

Sequence sequence_of(int64_t id, int64_t length, const AttentionCase& setup) {
  const auto values = [&](int64_t num_heads, double shift) {
    const at::Tensor count = at::arange(length * num_heads * kDim, at::kDouble).view({length, num_heads, kDim});
    return (count * 0.37 + shift + static_cast<double>(id)).sin();
  };
  Sequence sequence{
      .qkv = {values(setup.num_heads, 0.1), values(setup.num_kv_heads, 0.2), values(setup.num_kv_heads, 0.3)},
      .weight = values(setup.num_heads, 0.4),
      .o = {}};
  for (at::Tensor& tensor : sequence.qkv) tensor.set_requires_grad(true);
  const at::Tensor all = at::full({1}, length, at::kInt), start = at::zeros({1}, at::kInt);
  const at::Tensor o = attend(sequence.qkv[0], sequence.qkv[1], sequence.qkv[2], {all, all, start}, setup.mask_of());
  (o * sequence.weight).sum().backward();
  sequence.o = o.detach();
  return sequence;
}

/// What the test has met, over all ranks and rounds.
struct Met {
  std::atomic<int64_t> ranks_of_several_levels = 0, ranks_without_tokens = 0, uneven_chunks = 0, overlaps = 0;
  std::atomic<int64_t> bags_without_sharing = 0, query_parts = 0;
};

void check_rank(InProcessWorld& world, int32_t rank, const AttentionCase& setup, const std::vector<int64_t>& own_lens,
                const BalancerOptions& options, Met& met) {
  SequenceBalancer balancer(setup.topology, options, world.all(rank), world.groups_of(rank));
  const auto& all_to_alls = world.counts(rank).all_to_all;
  for (int32_t step = 0; step < 2; ++step) {
    balancer.plan_routing(own_lens, 16);
    const MicroBatchPlan& plan = balancer.plan();
    const AttentionTables tables = make_attention_tables(plan, Rank(rank));

    std::vector<std::vector<at::Tensor>> held(5);  // q, k, v, weight, o of this rank's chunks
    std::vector<at::Tensor> gradients[3];
    for (const int32_t c : plan.chunks_on(Rank(rank))) {
      const Chunk& chunk = plan.chunk(c);
      const Sequence s = sequence_of(chunk.sequence.value, plan.seq_lens()[chunk.sequence], setup);
      const auto part = [&](const at::Tensor& t) { return t.detach().narrow(0, chunk.first_token, chunk.num_tokens); };
      for (size_t i = 0; i < 3; ++i) {
        held[i].push_back(part(s.qkv[i]));
        gradients[i].push_back(part(s.qkv[i].grad()));
      }
      held[3].push_back(part(s.weight));
      held[4].push_back(part(s.o));
      const int64_t even = plan.seq_lens()[chunk.sequence] / plan.degree_of(chunk);
      if (std::abs(chunk.num_tokens - even) > 1) ++met.uneven_chunks;
    }
    const bool has_tokens = !held[0].empty();
    std::vector<at::Tensor> rows;
    for (size_t i = 0; i < held.size(); ++i) {
      const int64_t heads = i == 1 || i == 2 ? setup.num_kv_heads : setup.num_heads;
      rows.push_back(has_tokens ? at::cat(held[i]) : at::empty({0, heads, kDim}, at::kDouble));
    }
    // A rank without tokens has tensors without history: its backward must run all the same.
    for (size_t i = 0; i < 3; ++i) rows[i] = rows[i].clone().set_requires_grad(true);

    int64_t levels_with_tokens = 0, levels_with_sequences = 0, num_sequences = 0;
    for (const AttentionLevel& level : tables.levels) {
      levels_with_tokens += level.has_queries() ? 1 : 0;
      levels_with_sequences += level.sequences.empty() ? 0 : 1;
      met.query_parts += level.cuts_queries() && level.has_queries() ? 1 : 0;
    }
    const bool whole_here = tables.levels[0].degree == 1 && tables.levels[0].has_queries();
    const int64_t before = all_to_alls;
    int64_t num_calls = 0, at_whole = -1, at_whole_backward = -1;
    const auto of_parts = [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const SequenceRows& lens) {
      if (++num_calls == 1 && whole_here) {
        at_whole = all_to_alls;
        q.register_hook([&](const at::Tensor&) { at_whole_backward = all_to_alls; });
      }
      EXPECT_EQ(lens.query_lens.scalar_type(), at::kInt);
      num_sequences += lens.query_lens.numel();
      if (q.size(0) == 0) return at::empty({0, q.size(1), kDim}, at::kDouble);  // a kernel that keeps no graph
      return attend(q, k, v, lens, setup.mask_of());
    };
    const at::Tensor o = balancer.current().attention(
        rows[0], rows[1], rows[2], Attend{.kernel = of_parts, .cuts_queries = setup.cuts_queries()}, setup.mask_of());
    int64_t expected_exchanges = tables.any_shared || tables.levels[0].degree > 1 ? 2 : 0;
    if (expected_exchanges > 0) {
      for (const AttentionLevel& level : tables.levels) {
        expected_exchanges += level.stages.empty() ? 0 : std::ssize(level.stages) - 1;
      }
    }
    EXPECT_EQ(all_to_alls - before, expected_exchanges);
    EXPECT_EQ(num_calls, levels_with_sequences + (levels_with_tokens == 0 ? 1 : 0));
    if (levels_with_tokens > 0) {  // each in its place, also those of whose queries this rank has none
      EXPECT_EQ(num_sequences, std::ssize(plan.chunks_on(Rank(rank))));
    }
    EXPECT_TRUE(at::allclose(o, rows[4], 1e-12, 1e-14));
    const at::Tensor loss = (o * rows[3]).sum();
    if (expected_exchanges > 0 || has_tokens) loss.backward();
    EXPECT_EQ(all_to_alls - before, 2 * expected_exchanges);
    for (size_t i = 0; i < 3 && has_tokens; ++i) {
      EXPECT_TRUE(at::allclose(rows[i].grad(), at::cat(gradients[i]), 1e-11, 1e-13)) << "rank " << rank << " " << i;
    }
    if (whole_here && expected_exchanges > 0) {
      // What is whole here attends while the rest travels: in backward too, between the third exchange and the last.
      EXPECT_EQ(at_whole - before, 1);
      EXPECT_EQ(at_whole_backward - before, 2 * expected_exchanges);
      ++met.overlaps;
    }
    met.ranks_of_several_levels += levels_with_tokens > 1 ? 1 : 0;
    met.ranks_without_tokens += rows[0].size(0) == 0 ? 1 : 0;
    met.bags_without_sharing += tables.any_shared ? 0 : 1;
  }
}

class NestedAttention : public ::testing::TestWithParam<AttentionCase> {};

TEST_P(NestedAttention, IsThatOfWholeSequences) {
  const AttentionCase& setup = GetParam();
  Cases cases(31);
  Met met;
  for (int32_t round = 0; round < 8; ++round) {
    const SequenceLengths lens = cases.lengths(setup.num_ranks, 50);
    InProcessWorld world(setup.num_ranks);
    world.run_all([&](int32_t rank) {
      const BalancerOptions options{// An exchange costs a twentieth of a token's work: plans share, but not all.
                                    .plan = {.workload = {.gamma = 0.5},
                                             .cluster = {.flops_per_s = 1e9,
                                                         .node_bytes_per_s = 4e8,
                                                         .network_bytes_per_s = 4e8,
                                                         .node_latency_s = 0,
                                                         .fixed_s = 0,
                                                         .overlaps_attention = false},
                                             .model = setup.model(),
                                             .attention_cuts = setup.cuts},
                                    .mask = setup.mask_of(),
                                    .engine = setup.engine};
      const auto own = lens.lens(Rank(rank));
      check_rank(world, rank, setup, {own.begin(), own.end()}, options, met);
    });
  }
  if (setup.cuts_queries()) {
    EXPECT_GT(met.query_parts, 0);
  }
  if (setup.topology == "g4/2/1n1" && !setup.cuts_queries()) {
    EXPECT_GT(met.ranks_of_several_levels, 0);
    EXPECT_GT(met.uneven_chunks, 0);
    EXPECT_GT(met.overlaps, 0);
  }
  if (setup.topology == "g2/1n1" && setup.num_ranks == 8) {
    EXPECT_GT(met.bags_without_sharing, 0);
  }
}

TEST(NestedAttentionOfFewTokens, IncludesRanksWithoutAny) {
  const double free = std::numeric_limits<double>::infinity();
  const BalancerOptions options{
      .plan = {.cluster = {.node_bytes_per_s = free, .network_bytes_per_s = free, .node_latency_s = 0}}};
  Met met;
  for (const AttentionCase& setup :
       {AttentionCase{"g4/2n1", 4}, AttentionCase{"g4/2/1n1", 4}, AttentionCase{"g4n1", 4},
        AttentionCase{"g4/2n1", 4, 3, 3, ExchangeEngine::kCpu, "full", {{2, 2, 2}, {4, 4, 2}}}}) {
    InProcessWorld world(setup.num_ranks);
    BalancerOptions with_cuts = options;
    with_cuts.plan.model = setup.model();
    with_cuts.plan.attention_cuts = setup.cuts;
    for (const std::vector<int64_t>& lens : {std::vector<int64_t>{2}, {1, 1, 60}}) {
      world.run_all([&](int32_t rank) {
        check_rank(world, rank, setup, rank == 2 ? lens : std::vector<int64_t>{}, with_cuts, met);
      });
    }
  }
  EXPECT_GT(met.ranks_without_tokens, 0);
}

INSTANTIATE_TEST_SUITE_P(
    Topologies, NestedAttention,
    ::testing::Values(AttentionCase{"g1n2", 2}, AttentionCase{"g2n1", 2}, AttentionCase{"g2/1n1", 2},
                      AttentionCase{"g4/2/1n1", 4}, AttentionCase{"g4/2/1n1", 4, 8, 8, ExchangeEngine::kDevice},
                      AttentionCase{"g4/1n1", 4, 6, 2}, AttentionCase{"g4/2n1", 4, 7, 7},
                      AttentionCase{"g8/4/2/1n1", 8}, AttentionCase{"g8/4/2/1n1", 8, 3, 1},
                      AttentionCase{"g4/2/1n1+g3/1n1+g1n1", 8, 5, 5, ExchangeEngine::kDevice},
                      AttentionCase{"g2/1n1", 8}, AttentionCase{"g4n1", 4, 6, 2, ExchangeEngine::kKernel},
                      AttentionCase{"g4/2/1n1", 4, 8, 8, ExchangeEngine::kKernel},
                      AttentionCase{"g4/2n1", 4, 7, 7, ExchangeEngine::kKernel},
                      AttentionCase{"g8/4/2/1n1", 8, 3, 1, ExchangeEngine::kKernel},
                      AttentionCase{"g6/3/1n1+g2/1n1", 8, 5, 5, ExchangeEngine::kKernel},
                      AttentionCase{"g4n1", 4, 3, 3, ExchangeEngine::kCpu, "full"},
                      AttentionCase{"g4n1", 4, 2, 1, ExchangeEngine::kKernel, "causal"},
                      AttentionCase{"g4/2/1n1", 4, 6, 2, ExchangeEngine::kDevice, "prefix:3"},
                      AttentionCase{"g7/1n1", 7, 5, 5, ExchangeEngine::kKernel, "window:4:2"},
                      AttentionCase{"g8/4/2/1n1", 8, 1, 1, ExchangeEngine::kCpu, "block_causal:3:5"},
                      AttentionCase{"g8/4/2/1n1", 8, 6, 2, ExchangeEngine::kKernel, "causal"},
                      AttentionCase{"g8n1", 8, 12, 12, ExchangeEngine::kDevice, "full"},
                      AttentionCase{"g4n1", 4, 3, 3, ExchangeEngine::kCpu, "full", {{4, 4, 3}}},
                      AttentionCase{
                          "g8/4/2/1n1", 8, 6, 2, ExchangeEngine::kKernel, "full", {{2, 2, 2}, {4, 2, 4}, {8, 8, 3}}}),
    [](const auto& test) {
      const AttentionCase& s = test.param;
      std::string name = s.topology + "_on" + std::to_string(s.num_ranks) + "_" + std::to_string(s.num_heads) + "_" +
                         std::to_string(s.num_kv_heads) +
                         (s.engine == ExchangeEngine::kCpu      ? "_cpu"
                          : s.engine == ExchangeEngine::kDevice ? "_device"
                                                                : "_kernel") +
                         "_" + s.mask + (s.cuts.empty() ? "" : "_in_stages");
      for (char& c : name) {
        if (c == '+' || c == '/' || c == ':') c = '_';
      }
      return name;
    });

TEST(NestedBags, RefuseTheHalvesOfFlatAttention) {
  InProcessWorld world(2);
  const auto errors = world.run([&](int32_t rank) {
    SequenceBalancer balancer("g2/1n1", {.solver = "balanced"}, world.all(rank), world.groups_of(rank));
    balancer.plan_routing(std::vector<int64_t>{4}, 8);
    const at::Tensor q = at::zeros({balancer.plan().tokens_after()[static_cast<size_t>(rank)], 2, 2});
    balancer.current().pre_attn(q, q, q);
  });
  for (const auto& error : errors) {
    EXPECT_NE(testing::describe(error).find("pre_attn: got the topology g2/1n1, expected flat bags"), std::string::npos)
        << testing::describe(error);
  }
}

TEST(Step, SumsHalfTypesInFloat) {
  // 8 ranks share a sequence: the sum of 256 and seven times 1 is 256 in bfloat16, 263 -> 264 by way of float.
  testing::InProcessWorld world(8);
  world.run_all([&](int32_t rank) {
    for (const ExchangeEngine engine : {ExchangeEngine::kCpu, ExchangeEngine::kDevice}) {
      SequenceBalancer balancer("g8n1", {.solver = "greedy", .engine = engine}, world.all(rank), world.groups_of(rank));
      balancer.plan_routing(rank == 3 ? std::vector<int64_t>{16} : std::vector<int64_t>{}, 8);
      const int64_t count = rank == 3 ? 1 : 0;
      const at::Tensor side = at::ones({count, 2}, at::kBFloat16).set_requires_grad(true);
      const Step::Routed routed = balancer.current().route(at::zeros({count * 16, 1}), {}, {side});
      (routed.sequence_features.at(0) * (rank == 0 ? 256 : 1)).sum().backward();
      EXPECT_TRUE(rank != 3 || side.grad()[0][1].item<double>() == 264.0);
    }
  });
}

}  // namespace
}  // namespace knapformer
