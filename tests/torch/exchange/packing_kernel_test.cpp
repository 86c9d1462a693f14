// Where columns lie in the buffer; the packing kernel thread by thread against the other engines, over random tables:
// rows and heads that go to several peers, their sums on the way back, strided inputs, widths of any alignment.
#include "knapformer/torch/exchange/packing_kernel.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>

#include "knapformer/core/plan/attention_tables.h"
#include "knapformer/torch/exchange/exchange_buffer.h"
#include "tests/core/cases.h"
#include "tests/torch/exchange/tables.h"

namespace knapformer {
namespace {

/// What a rank gives to an exchange, by segment, without its engine.
struct SegmentOfRank {
  ExchangeTable table;
  std::vector<at::Tensor> tensors = {};
  std::vector<HeadRole> roles = {};
  HeadSharing sharing = {};
  bool inverse = false;
};
using RankInputs = std::vector<SegmentOfRank>;
using Outputs = std::vector<std::vector<at::Tensor>>;  // by rank

/// An exchange of ranks of this process, in which a copy is the transport.
Outputs exchange_between(const std::vector<RankInputs>& ranks, HeadCounts heads, ExchangeEngine engine) {
  std::vector<ExchangeArguments> given;  // calls read its tables
  given.reserve(ranks.size());
  std::vector<std::unique_ptr<ExchangeBuffer>> calls;
  for (const RankInputs& inputs : ranks) {
    ExchangeArguments& arguments = given.emplace_back(ExchangeArguments{.heads = heads, .call = "test"});
    Tensors tensors;
    for (const SegmentOfRank& segment : inputs) {
      const PackedTable table = pack_tables(std::vector{&segment.table}, engine, at::kCPU)[0];
      arguments.segments.push_back(
          {.table = segment.inverse ? table.inverse() : table, .roles = segment.roles, .sharing = segment.sharing});
      tensors.insert(tensors.end(), segment.tensors.begin(), segment.tensors.end());
    }
    calls.push_back(std::make_unique<ExchangeBuffer>(tensors, arguments));
    calls.back()->wire().fill_(0xee);
    calls.back()->pack();
    calls.back()->move_own();
  }
  for (size_t from = 0; from < ranks.size(); ++from) {
    int64_t sent_at = 0;
    for (size_t to = 0; to < ranks.size(); ++to) {
      const std::vector<int64_t>& received = calls[to]->received_bytes();
      const auto end = received.begin() + static_cast<std::ptrdiff_t>(from);
      const int64_t num_bytes = calls[from]->sent_bytes()[to],
                    received_at = std::accumulate(received.begin(), end, int64_t{0});
      EXPECT_EQ(num_bytes, *end);
      calls[to]->received().narrow(0, received_at, num_bytes).copy_(calls[from]->sent().narrow(0, sent_at, num_bytes));
      sent_at += num_bytes;
    }
  }
  Outputs outputs;
  for (const auto& call : calls) outputs.push_back(call->unpack());
  return outputs;
}

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() &&
         (a.nbytes() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0);
}

void expect_engines_agree(const std::vector<RankInputs>& ranks, HeadCounts heads) {
  const Outputs cpu = exchange_between(ranks, heads, ExchangeEngine::kCpu);
  const Outputs kernel = exchange_between(ranks, heads, ExchangeEngine::kKernel);
  const Outputs device = exchange_between(ranks, heads, ExchangeEngine::kDevice);
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    ASSERT_EQ(kernel[rank].size(), cpu[rank].size());
    for (size_t i = 0; i < cpu[rank].size(); ++i) {
      ASSERT_TRUE(same_bytes(kernel[rank][i], cpu[rank][i])) << "rank " << rank << ", tensor " << i;
      ASSERT_TRUE(same_bytes(device[rank][i], cpu[rank][i])) << "rank " << rank << ", tensor " << i;
    }
  }
}

class Random : public Cases {
 public:
  explicit Random(uint64_t seed) : Cases(seed), random_(seed + 1) {}

  at::ScalarType sum_type() {
    const std::vector types{at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kComplexFloat};
    return types[static_cast<size_t>(integer(0, 4))];
  }
  at::ScalarType any_type() {
    const std::vector types{at::kByte, at::kShort, at::kInt, at::kLong, at::kComplexDouble};
    return integer(0, 1) == 0 ? sum_type() : types[static_cast<size_t>(integer(0, 4))];
  }

  /// Values in rows that lie apart, or not.
  at::Tensor values(std::vector<int64_t> shape, at::ScalarType type) {
    const int64_t apart = integer(0, 1) == 0 ? 0 : integer(1, 3), columns = shape.back();
    shape.back() += shape.size() == 2 ? apart : 0;
    at::Tensor made = at::empty(shape, at::kDouble);
    std::normal_distribution<double> normal;
    for (int64_t i = 0; i < made.numel(); ++i) made.mutable_data_ptr<double>()[i] = normal(random_);
    const at::Tensor typed = (at::isFloatingType(type) || at::isComplexType(type) ? made : made.abs() * 20).to(type);
    return shape.size() == 2 ? typed.narrow(1, shape.back() - columns, columns) : typed;
  }

  /// Tables of all ranks, in which a row may go to several peers.
  std::vector<ExchangeTable> tables(int32_t num_ranks, int64_t max_rows) {
    testing::Rows sent;
    std::vector<int64_t> num_rows;
    const bool duplicate = integer(0, 2) > 0;
    for (int32_t rank = 0; rank < num_ranks; ++rank) {
      auto& of_peers = sent.emplace_back(static_cast<size_t>(num_ranks));
      num_rows.push_back(integer(0, 3) == 0 ? 0 : integer(0, max_rows));
      for (const int64_t row : testing::shuffled(num_rows.back(), random_)) {
        std::vector<int64_t> peers = testing::shuffled(num_ranks, random_, /*max_run=*/1);
        peers.resize(static_cast<size_t>(duplicate ? integer(1, std::min<int64_t>(num_ranks, 4)) : 1));
        for (const int64_t peer : peers) of_peers[static_cast<size_t>(peer)].push_back(row);
      }
    }
    return testing::make_world(sent, num_rows, random_).tables;
  }

 private:
  std::mt19937_64 random_;
};

// A wide tensor beside three integers and one flag, as FLUX routes, and a segment of other rows.
TEST(WireLayout, NarrowColumnsDoNotNarrowTheWordsOfWideOnes) {
  Cases cases(33);
  for (int32_t round = 0; round < 10; ++round) {
    const MicroBatchPlan plan = cases.any_plan(cases.input(/*nested=*/true));
    const auto num_ranks = static_cast<size_t>(plan.num_ranks());
    std::vector<std::vector<int64_t>> sent(num_ranks), received(num_ranks);
    for (size_t r = 0; r < num_ranks; ++r) {
      const RouteTables route = make_route_tables(plan, Rank(static_cast<int32_t>(r)));
      const ExchangeTable* const tables[] = {&route.tokens, &route.sequences};
      const std::vector<PackedTable> packed = pack_tables(tables, ExchangeEngine::kCpu, at::kCPU);
      const int64_t tokens = route.tokens.send.num_rows, sequences = route.sequences.send.num_rows;
      ExchangeArguments arguments{.call = "route"};
      arguments.add(packed[0], 3);
      arguments.add(packed[1], 1);
      const Tensors tensors = {at::empty({tokens, 64}, at::kBFloat16), at::empty({tokens, 3}, at::kInt),
                               at::empty({tokens}, at::kBool), at::empty({sequences, 3}, at::kFloat)};
      const ExchangeBuffer call(tensors, arguments);
      const std::span<const Segment> segments = call.segments();
      for (const std::vector<WireBlock>& blocks : {call.sent_blocks(), call.received_blocks()}) {
        for (const WireBlock& block : blocks) {
          EXPECT_EQ(block.first_byte % 16, 0);
          constexpr int64_t kBytes[] = {128, 12, 1};
          EXPECT_EQ(block.row_bytes,
                    block.segment == &segments[0] ? kBytes[block.slot - segments[0].slots.data()] : 12);
        }
      }
      sent[r] = call.sent_bytes();
      received[r] = call.received_bytes();
    }
    for (size_t from = 0; from < num_ranks; ++from) {
      for (size_t to = 0; to < num_ranks; ++to) {
        EXPECT_EQ(sent[from][to] % 16, 0);
        EXPECT_EQ(sent[from][to], received[to][from]);
      }
    }
  }
}

TEST(PackingKernel, MovesAndAddsRowsAsTheOtherEngines) {
  Random random(11);
  int64_t num_tables = 0;
  while (num_tables < 3000) {
    const auto num_ranks = static_cast<int32_t>(random.integer(1, 6));
    const bool inverse = random.integer(0, 1) == 1;
    const bool large = random.integer(0, 30) == 0;  // several tiles
    std::vector<RankInputs> ranks(static_cast<size_t>(num_ranks));
    for (int64_t s = random.integer(1, 3); s > 0; --s) {
      const std::vector<ExchangeTable> tables = random.tables(num_ranks, large ? 400 : 12);
      num_tables += num_ranks;
      for (size_t rank = 0; rank < ranks.size(); ++rank)
        ranks[rank].push_back({.table = tables[rank], .inverse = inverse});
      for (int64_t t = random.integer(1, 3); t > 0; --t) {
        const at::ScalarType type = inverse ? random.sum_type() : random.any_type();
        const int64_t columns = random.integer(0, large ? 40 : 9);
        for (RankInputs& inputs : ranks) {
          SegmentOfRank& segment = inputs.back();
          const ExchangeEnd& from = inverse ? segment.table.recv : segment.table.send;
          segment.tensors.push_back(random.values({from.num_rows, columns}, type));
          segment.roles.push_back(HeadRole::kNone);
        }
      }
    }
    ASSERT_NO_FATAL_FAILURE(expect_engines_agree(ranks, {}));
  }
}

TEST(PackingKernel, SharesAndAddsHeadsAsTheOtherEngines) {
  Random random(12);
  int64_t num_bags = 0;
  while (num_bags < 150) {
    PlanInput input = random.input(/*nested=*/random.integer(0, 3) > 0);
    if (num_bags % 2 == 0) random.cut_attention(input);
    const MicroBatchPlan plan = random.any_plan(std::move(input));
    const std::vector<HeadCounts> counts{{6, 2}, {5, 5}, {8, 1}, {24, 24}};
    const HeadCounts heads = counts[static_cast<size_t>(random.integer(0, 3))];
    for (int32_t first = 0; first < plan.num_ranks();) {
      const int32_t num_ranks = plan.topology().bag(plan.topology().bag_of(Rank(first))).num_ranks;
      const bool inverse = random.integer(0, 1) == 1;
      const at::ScalarType type = random.sum_type();
      std::vector<RankInputs> ranks;
      for (int32_t rank = first; rank < first + num_ranks; ++rank) {
        RankInputs& inputs = ranks.emplace_back();
        for (const AttentionLevel& level : make_attention_tables(plan, Rank(rank)).levels) {
          if (level.degree == 1) continue;
          const HeadPartition partition = partition_heads(heads.num_heads, heads.num_kv_heads, level.head_parts());
          const auto values = [&](const ExchangeTable& table, const HeadShares& shares, int64_t all) {
            const int64_t here = std::ssize(shares.of(level.index_in_group % level.head_parts()));
            return inverse ? random.values({table.recv.num_rows, here, 3}, type)
                           : random.values({table.send.num_rows, all, 3}, type);
          };
          const ExchangeTable& keys = level.cuts_queries() ? level.stages.back().keys : level.queries;
          inputs.push_back({.table = level.queries,
                            .tensors = {values(level.queries, partition.query, heads.num_heads)},
                            .roles = {HeadRole::kQuery},
                            .sharing = level,
                            .inverse = inverse});
          inputs.push_back({.table = keys,
                            .tensors = {values(keys, partition.key_value, heads.num_kv_heads)},
                            .roles = {HeadRole::kKey},
                            .sharing = level,
                            .inverse = inverse});
        }
      }
      if (!ranks[0].empty()) {
        ASSERT_NO_FATAL_FAILURE(expect_engines_agree(ranks, heads));
        ++num_bags;
      }
      first += num_ranks;
    }
  }
}

/// A tile of rows of 3 bytes beside each other, more than 2^32 bytes in all. Only those of the tile are in memory.
void expect_copied(int tile, int num_rows) {
  const int64_t first = int64_t{tile} * packing::kTile, end = int64_t{num_rows} * 3;
  const auto num_bytes = static_cast<size_t>(std::min<int64_t>(packing::kTile, end - first));
  std::vector<unsigned char> from(packing::kTile), to(packing::kTile), expected(packing::kTile);
  for (size_t i = 0; i < num_bytes; ++i) expected[i] = from[i] = static_cast<unsigned char>(1 + i % 251);
  const auto address_of_first_row = [&](const std::vector<unsigned char>& of_tile) {
    return reinterpret_cast<packing::Address>(of_tile.data()) - static_cast<packing::Address>(first);
  };
  const packing::Work work{.num_copies = 1,
                           .copies = {{.from = address_of_first_row(from),
                                       .to = address_of_first_row(to),
                                       .from_stride = 3,
                                       .to_stride = 3,
                                       .num_words = 3,
                                       .word_bytes = 1,
                                       .num_rows = num_rows}}};
  for (int thread = 0; thread < packing::kThreads; ++thread) packing::run_thread(work, tile, thread);
  EXPECT_EQ(to, expected) << "tile " << tile;
}

TEST(PackingKernel, FindsRowsBehindTheFirst4GigaWords) {
  constexpr int kRows = std::numeric_limits<int>::max();
  const auto num_tiles = static_cast<int>((int64_t{kRows} * 3 + packing::kTile - 1) / packing::kTile);
  for (const int tile : {0, 1, (1 << 22) - 1, 1 << 22, (1 << 22) + 1, num_tiles - 2, num_tiles - 1}) {
    expect_copied(tile, kRows);
  }
}

}  // namespace
}  // namespace knapformer
