// SequenceBalancer over ranks that are threads. The oracle is an index formula: every token carries its sequence and
// place, so what a rank must hold follows from the plan's chunks alone.
#include "knapformer/torch/balancer.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/core/cases.h"
#include "tests/torch/in_process_group.h"
#include "tests/torch/numbered_tokens.h"

namespace knapformer {
namespace {

using testing::InProcessWorld;
using testing::numbered;
using testing::Token;

/// The tokens of a rank's own sequences, in order.
std::vector<Token> home_tokens(const Plan& plan, int32_t rank) {
  std::vector<Token> tokens;
  for (int32_t s = plan.seq_lens().first_of(Rank(rank)).value; s < plan.seq_lens().last_of(Rank(rank)).value; ++s) {
    for (int64_t p = 0; p < plan.seq_lens()[SequenceId(s)]; ++p) tokens.push_back({s, p});
  }
  return tokens;
}

/// The tokens of the chunks that a rank holds, in order.
std::vector<Token> chunk_tokens(const Plan& plan, int32_t rank) {
  std::vector<Token> tokens;
  for (const int32_t index : plan.chunks_on(Rank(rank))) {
    const Chunk& chunk = plan.chunk(index);
    for (int64_t i = 0; i < chunk.num_tokens; ++i) tokens.push_back({chunk.sequence.value, chunk.first_token + i});
  }
  return tokens;
}

/// The tokens that attention on a rank sees: all of each sequence that its bag was given.
std::vector<Token> attention_tokens(const Plan& plan, int32_t rank) {
  std::vector<Token> tokens;
  for (int32_t s = 0; s < plan.num_sequences(); ++s) {
    if (!plan.topology().bag(plan.placement(SequenceId(s)).bag).holds(Rank(rank))) continue;
    for (int64_t p = 0; p < plan.seq_lens()[SequenceId(s)]; ++p) tokens.push_back({s, p});
  }
  return tokens;
}

std::vector<int64_t> to_list(const at::Tensor& lens) {
  EXPECT_EQ(lens.scalar_type(), at::kInt);
  std::vector<int64_t> list;
  for (int64_t i = 0; i < lens.numel(); ++i) list.push_back(lens[i].item<int64_t>());
  return list;
}

struct Setup {
  std::string topology;
  int32_t num_ranks = 1;
  ExchangeEngine engine = ExchangeEngine::kCpu;
  std::string solver = "greedy";
};

void PrintTo(const Setup& setup, std::ostream* out) { *out << setup.topology << " on " << setup.num_ranks << " ranks"; }

std::unique_ptr<SequenceBalancer> make_balancer(InProcessWorld& world, int32_t rank, const Setup& setup) {
  return std::make_unique<SequenceBalancer>(
      setup.topology,
      BalancerOptions{.plan = {.workload = {.gamma = 0.5}}, .solver = setup.solver, .engine = setup.engine},
      world.all(rank), [&world, rank](const std::vector<int64_t>& ranks) { return world.group(ranks, rank); });
}

/// Lengths of all ranks: some ranks without sequences, some sequences of a token or two.
std::vector<std::vector<int64_t>> random_lengths(Cases& cases, int32_t num_ranks) {
  const SequenceLengths lens = cases.lengths(num_ranks, 40);
  std::vector<std::vector<int64_t>> lists;
  for (int32_t r = 0; r < num_ranks; ++r) lists.emplace_back(lens.lens(Rank(r)).begin(), lens.lens(Rank(r)).end());
  return lists;
}

class Balancer : public ::testing::TestWithParam<Setup> {};

std::vector<Setup> setups() {
  std::vector<Setup> all;
  for (const auto& [topology, num_ranks] : std::vector<std::pair<std::string, int32_t>>{{"g1n2", 2},
                                                                                        {"g2n1", 2},
                                                                                        {"g1n1+g2n1", 3},
                                                                                        {"g3n1", 3},
                                                                                        {"g2n2", 4},
                                                                                        {"g4n1", 4},
                                                                                        {"g2n1", 4},
                                                                                        {"g1n2+g2n1", 8},
                                                                                        {"g8n1", 8},
                                                                                        {"g4n2", 8},
                                                                                        {"g3n1+g5n1", 8}}) {
    for (const ExchangeEngine engine : {ExchangeEngine::kCpu, ExchangeEngine::kDevice}) {
      for (const char* solver : {"greedy", "balanced"}) all.push_back({topology, num_ranks, engine, solver});
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Topologies, Balancer, ::testing::ValuesIn(setups()), [](const auto& test) {
  std::string name = test.param.topology + "_on" + std::to_string(test.param.num_ranks) + "_" + test.param.solver +
                     (test.param.engine == ExchangeEngine::kCpu ? "_cpu" : "_device");
  std::replace(name.begin(), name.end(), '+', '_');
  return name;
});

TEST_P(Balancer, RoutesForthAndBack) {
  Cases cases(11);
  for (int32_t round = 0; round < 6; ++round) {
    const auto lists = random_lengths(cases, GetParam().num_ranks);
    InProcessWorld world(GetParam().num_ranks);
    world.run_all([&](int32_t rank) {
      const auto balancer = make_balancer(world, rank, GetParam());
      balancer->plan_routing(lists[static_cast<size_t>(rank)], 8);
      const Plan& plan = balancer->plan();
      const std::vector<Token> home = home_tokens(plan, rank), held = chunk_tokens(plan, rank);
      const at::Tensor x = numbered(home, 3, 1.0).set_requires_grad(true);
      const at::Tensor ids = numbered(home, 1, 1.0).squeeze(1).to(at::kLong);
      const at::Tensor bits = ids.remainder(3).eq(0).unsqueeze(1).expand({-1, 5});

      const Step::Routed routed = balancer->current().route(x, {ids, bits});
      std::vector<int64_t> chunk_lens;
      for (const int32_t c : plan.chunks_on(Rank(rank))) chunk_lens.push_back(plan.chunk(c).num_tokens);
      EXPECT_EQ(to_list(routed.chunk_lens), chunk_lens);
      EXPECT_TRUE(at::equal(routed.x, numbered(held, 3, 1.0)));
      const at::Tensor held_ids = numbered(held, 1, 1.0).squeeze(1).to(at::kLong);
      EXPECT_TRUE(at::equal(routed.features.at(0), held_ids));
      EXPECT_TRUE(at::equal(routed.features.at(1), held_ids.remainder(3).eq(0).unsqueeze(1).expand({-1, 5})));

      const Step::Returned back = balancer->current().reverse_route(routed.x * 2);
      EXPECT_EQ(to_list(back.seq_lens), lists[static_cast<size_t>(rank)]);
      EXPECT_TRUE(at::equal(back.x, x * 2));
      // A loss that weighs every token on its own.
      (back.x * numbered(home, 3, 0.5)).sum().backward();
      EXPECT_TRUE(at::equal(x.grad(), numbered(home, 3, 1.0)));
    });
  }
}

TEST_P(Balancer, SideDataReachesEveryChunkAndSumsBack) {
  Cases cases(12);
  for (int32_t round = 0; round < 6; ++round) {
    const auto lists = random_lengths(cases, GetParam().num_ranks);
    InProcessWorld world(GetParam().num_ranks);
    for (const at::ScalarType dtype : {at::kDouble, at::kBFloat16}) {
      world.run_all([&](int32_t rank) {
        const auto balancer = make_balancer(world, rank, GetParam());
        balancer->plan_routing(lists[static_cast<size_t>(rank)], 8);
        const Plan& plan = balancer->plan();
        const int64_t first = plan.seq_lens().first_of(Rank(rank)).value;
        const auto count = static_cast<int64_t>(lists[static_cast<size_t>(rank)].size());
        const at::Tensor x = at::zeros({plan.tokens_before()[static_cast<size_t>(rank)], 1});
        const at::Tensor side =
            (at::arange(count, at::kDouble) + first).unsqueeze(1).expand({-1, 2}).to(dtype).set_requires_grad(true);
        const at::Tensor numbers = at::arange(count, at::kInt) + first;

        const Step::Routed routed = balancer->current().route(x, {}, {side, numbers});
        // The gradient of each holder is its rank's number plus 1.
        at::Tensor loss = (routed.sequence_features.at(0) * (rank + 1)).sum() + routed.x.sum();
        const auto chunks = plan.chunks_on(Rank(rank));
        ASSERT_EQ(routed.sequence_features.at(1).size(0), static_cast<int64_t>(chunks.size()));
        for (size_t i = 0; i < chunks.size(); ++i) {
          const int32_t sequence = plan.chunk(chunks[i]).sequence.value;
          ASSERT_EQ(routed.sequence_features[1][static_cast<int64_t>(i)].item<int64_t>(), sequence);
          ASSERT_EQ(routed.sequence_features[0][static_cast<int64_t>(i)][1].item<double>(), sequence);  // small: exact
        }
        loss.backward();
        for (int64_t s = 0; s < count; ++s) {
          double expected = 0;
          for (const Chunk& chunk : plan.chunks(SequenceId(first + s))) expected += chunk.rank.value + 1;
          ASSERT_EQ(side.grad()[s][0].item<double>(), expected) << "rank " << rank << " sequence " << first + s;
          ASSERT_EQ(side.grad()[s][1].item<double>(), expected);
        }
      });
    }
  }
}

struct Heads {
  int64_t query = 0;
  int64_t key_value = 0;
};

/// Attention's inputs and back. Values name (token, head, column); gradients also the rank and the local head that they
/// come from, so that sums over repeated key/value heads are seen.
void check_attention(const Setup& setup, const Heads& heads, uint64_t seed) {
  SCOPED_TRACE(::testing::Message() << heads.query << " heads, " << heads.key_value << " kv heads");
  Cases cases(seed);
  const auto lists = random_lengths(cases, setup.num_ranks);
  InProcessWorld world(setup.num_ranks);
  constexpr int64_t kHeadDim = 2;
  const auto values_of = [&](const std::vector<Token>& tokens, int64_t num_heads, double scale) {
    return numbered(tokens, num_heads * kHeadDim, scale)
        .view({static_cast<int64_t>(tokens.size()), num_heads, kHeadDim});
  };
  const auto weight_of = [](int32_t rank, int64_t local_head) {
    return static_cast<double>(rank * 64 + local_head + 1);
  };
  world.run_all([&](int32_t rank) {
    const auto balancer = make_balancer(world, rank, setup);
    balancer->plan_routing(lists[static_cast<size_t>(rank)], 8);
    const Plan& plan = balancer->plan();
    const std::vector<Token> held = chunk_tokens(plan, rank), seen = attention_tokens(plan, rank);
    const Bag& bag = plan.topology().bag(plan.topology().bag_of(Rank(rank)));
    const HeadPartition partition = partition_heads(heads.query, heads.key_value, bag.num_ranks);
    const int32_t index = rank - bag.first_rank.value;

    const at::Tensor q = values_of(held, heads.query, 1).set_requires_grad(true);
    const at::Tensor k = values_of(held, heads.key_value, 2).set_requires_grad(true);
    const at::Tensor v = values_of(held, heads.key_value, 3).set_requires_grad(true);
    const Step::AttentionInputs inputs = balancer->current().pre_attn(q, k, v);

    const auto expect_heads = [&](const at::Tensor& got, const HeadShares& shares, int64_t num_heads, double scale) {
      const at::Tensor whole = values_of(seen, num_heads, scale);
      const auto share = shares.of(index);
      ASSERT_EQ(got.sizes(), (std::vector<int64_t>{whole.size(0), static_cast<int64_t>(share.size()), kHeadDim}));
      for (size_t h = 0; h < share.size(); ++h) {
        ASSERT_TRUE(at::equal(got.select(1, static_cast<int64_t>(h)), whole.select(1, share[h])))
            << "rank " << rank << " head " << h;
      }
    };
    expect_heads(inputs.q, partition.query, heads.query, 1);
    expect_heads(inputs.k, partition.key_value, heads.key_value, 2);
    expect_heads(inputs.v, partition.key_value, heads.key_value, 3);
    std::vector<int64_t> seen_lens;
    for (int32_t s = 0; s < plan.num_sequences(); ++s) {
      if (plan.placement(SequenceId(s)).bag == plan.topology().bag_of(Rank(rank)))
        seen_lens.push_back(plan.seq_lens()[SequenceId(s)]);
    }
    EXPECT_EQ(to_list(inputs.seq_lens), seen_lens);

    const Step::AttentionOutput output = balancer->current().post_attn(inputs.q * 7);
    EXPECT_TRUE(at::equal(output.o, q * 7));

    at::Tensor loss = output.o.sum();
    for (const at::Tensor& tensor : {inputs.k, inputs.v}) {
      for (int64_t h = 0; h < tensor.size(1); ++h) loss = loss + (tensor.select(1, h) * weight_of(rank, h)).sum();
    }
    loss.backward();
    EXPECT_TRUE(at::equal(q.grad(), at::full_like(q, 7.0)));
    for (int64_t head = 0; head < heads.key_value; ++head) {
      double expected = 0;
      for (int32_t peer = 0; peer < bag.num_ranks; ++peer) {
        const auto share = partition.key_value.of(peer);
        for (size_t local = 0; local < share.size(); ++local) {
          if (share[local] == head) expected += weight_of(bag.first_rank.value + peer, static_cast<int64_t>(local));
        }
      }
      ASSERT_TRUE(at::equal(k.grad().select(1, head),
                            at::full({static_cast<int64_t>(held.size()), kHeadDim}, expected, at::kDouble)));
      ASSERT_TRUE(at::equal(v.grad().select(1, head), k.grad().select(1, head)));
    }
  });
}

TEST_P(Balancer, AttentionSeesWholeSequencesAndItsShareOfTheHeads) {
  uint64_t seed = 100;
  for (const Heads& heads : std::vector<Heads>{{8, 8}, {7, 7}, {6, 2}, {12, 3}, {8, 1}, {2, 2}, {6, 3}, {5, 1}}) {
    check_attention(GetParam(), heads, seed++);
  }
}

TEST(BalancerBackward, SumsHalfTypesInFloat) {
  // 8 ranks share a sequence: the sum of 256 and seven times 1 is 256 in bfloat16, 263 -> 264 by way of float.
  InProcessWorld world(8);
  world.run_all([&](int32_t rank) {
    for (const ExchangeEngine engine : {ExchangeEngine::kCpu, ExchangeEngine::kDevice}) {
      const auto balancer = make_balancer(world, rank, {"g8n1", 8, engine, "greedy"});
      balancer->plan_routing(rank == 3 ? std::vector<int64_t>{16} : std::vector<int64_t>{}, 8);
      const int64_t count = rank == 3 ? 1 : 0;
      const at::Tensor side = at::ones({count, 2}, at::kBFloat16).set_requires_grad(true);
      const auto routed = balancer->current().route(at::zeros({count * 16, 1}), {}, {side});
      (routed.sequence_features.at(0) * (rank == 0 ? 256 : 1)).sum().backward();
      EXPECT_TRUE(rank != 3 || side.grad()[0][1].item<double>() == 264.0);
    }
  });
}

}  // namespace
}  // namespace knapformer
