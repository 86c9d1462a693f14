// Exchanges that share heads, over any plan at all, also of nested bags: all levels of a bag in one all-to-all, each
// with its own shares of the heads. The oracle is an index formula. And where columns lie in the buffer.
#include "knapformer/torch/exchange/call.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "knapformer/torch/exchange/exchange.h"
#include "tests/core/cases.h"
#include "tests/torch/in_process_group.h"
#include "tests/torch/numbered_tokens.h"

namespace knapformer {
namespace {

using testing::Token;

constexpr int64_t kHeads = 6, kKeyValueHeads = 2, kHeadDim = 2;

at::Tensor values_of(const std::vector<Token>& tokens, int64_t num_heads, double scale) {
  const auto num_tokens = static_cast<int64_t>(tokens.size());
  return testing::numbered(tokens, num_heads * kHeadDim, scale).view({num_tokens, num_heads, kHeadDim});
}

std::vector<Token> tokens_of(SequenceId id, int64_t first, int64_t count) {
  std::vector<Token> tokens;
  for (int64_t i = 0; i < count; ++i) tokens.push_back({id.value, first + i});
  return tokens;
}

void append(std::vector<Token>& all, const std::vector<Token>& more) {
  all.insert(all.end(), more.begin(), more.end());
}

void check_rank(testing::InProcessWorld& world, const Plan& plan, int32_t rank, ExchangeEngine engine) {
  const AttentionTables tables = make_attention_tables(plan, Rank(rank));
  const Bag& bag = plan.topology().bag(tables.bag);
  if (bag.num_ranks == 1) return;
  std::vector<int64_t> ranks;
  for (int32_t i = 0; i < bag.num_ranks; ++i) ranks.push_back(bag.first_rank.value + i);
  const auto group = world.group(ranks, rank);
  const auto watchdog = std::make_shared<Watchdog>(group->getStore(), rank);
  const auto comm = CommGroup::make("levels@" + std::to_string(rank), group, "levels", watchdog);

  std::vector<const AttentionLevel*> levels;  // of several ranks
  std::vector<const ExchangeTable*> exchanges;
  for (const AttentionLevel& level : tables.levels) {
    if (level.degree == 1) continue;
    levels.push_back(&level);
    exchanges.push_back(&level.pre_attn);
  }
  if (levels.empty()) return;
  const std::vector<PackedTable> packed = pack_tables(exchanges, engine, at::kCPU);
  std::vector<Token> held;
  for (const int32_t c : plan.chunks_on(Rank(rank))) {
    append(held, tokens_of(plan.chunk(c).sequence, plan.chunk(c).first_token, plan.chunk(c).num_tokens));
  }
  const at::Tensor q = values_of(held, kHeads, 1).set_requires_grad(true);
  const at::Tensor k = values_of(held, kKeyValueHeads, 2).set_requires_grad(true);

  const HeadCounts heads{.num_heads = kHeads, .num_kv_heads = kKeyValueHeads};
  ExchangeArguments there{.heads = heads, .group = comm->name(), .label = "there"};
  for (size_t i = 0; i < levels.size(); ++i) {
    const AttentionLevel& level = *levels[i];
    there.add(packed[i], {q.narrow(0, level.first_row, level.num_rows), k.narrow(0, level.first_row, level.num_rows)},
              {HeadRole::kQuery, HeadRole::kKeyValue},
              {.shared_end = HeadSharing::kSend, .degree = level.degree, .index_in_group = level.index_in_group});
  }
  const std::vector<at::Tensor> seen = exchange(there);

  ExchangeArguments back{.heads = heads, .group = comm->name(), .label = "back"};
  for (size_t i = 0; i < levels.size(); ++i) {
    const AttentionLevel& level = *levels[i];
    // The sequences that the group of this rank at this level shares, whole.
    const int32_t first_rank = rank - level.index_in_group;
    std::vector<Token> expected;
    for (int32_t s = 0; s < plan.num_sequences(); ++s) {
      const Placement& place = plan.placement(SequenceId(s));
      if (place.degree == level.degree && place.first_rank.value == first_rank) {
        append(expected, tokens_of(SequenceId(s), 0, plan.seq_lens()[SequenceId(s)]));
      }
    }
    const HeadPartition partition = partition_heads(kHeads, kKeyValueHeads, level.degree);
    for (const auto& [tensor, shares, num_heads, scale] :
         {std::tuple(seen[2 * i], &partition.query, kHeads, 1.0),
          std::tuple(seen[2 * i + 1], &partition.key_value, kKeyValueHeads, 2.0)}) {
      const at::Tensor whole = values_of(expected, num_heads, scale);
      const auto share = shares->of(level.index_in_group);
      ASSERT_EQ(tensor.size(0), whole.size(0));
      ASSERT_EQ(tensor.size(1), static_cast<int64_t>(share.size()));
      for (size_t h = 0; h < share.size(); ++h) {
        ASSERT_TRUE(at::equal(tensor.select(1, static_cast<int64_t>(h)), whole.select(1, share[h])));
      }
    }
    back.add(packed[i].inverse(), {seen[2 * i] * level.degree}, {HeadRole::kQuery},
             {.shared_end = HeadSharing::kRecv, .degree = level.degree, .index_in_group = level.index_in_group});
  }
  const std::vector<at::Tensor> returned = exchange(back);
  at::Tensor loss = at::zeros({}, at::kDouble);
  for (size_t i = 0; i < levels.size(); ++i) {
    ASSERT_TRUE(at::equal(returned[i], there.tensors[2 * i] * levels[i]->degree));
    loss = loss + returned[i].sum() + seen[2 * i + 1].sum();
  }
  loss.backward();
  for (const AttentionLevel* at_level : levels) {
    const AttentionLevel& level = *at_level;
    const at::Tensor gradient = q.grad().narrow(0, level.first_row, level.num_rows);
    ASSERT_TRUE(at::equal(gradient, at::full_like(gradient, level.degree)));
    // A key head's gradient comes from every rank that was given it, as often as it was.
    const HeadShares shares = partition_heads(kHeads, kKeyValueHeads, level.degree).key_value;
    for (int64_t head = 0; head < kKeyValueHeads; ++head) {
      const auto times = std::ranges::count(shares.heads.values, head);
      const at::Tensor of_head = k.grad().narrow(0, level.first_row, level.num_rows).select(1, head);
      ASSERT_TRUE(at::equal(of_head, at::full_like(of_head, static_cast<double>(times))));
    }
  }
}

TEST(HeadSharing, TakesAllLevelsOfAnyPlanTogether) {
  Cases cases(21);
  constexpr int32_t kPlans = 20;
  int32_t num_checked = 0;
  for (int32_t round = 0; num_checked < kPlans; ++round) {
    const Plan plan = cases.any_plan(cases.input(/*nested=*/round % 4 != 0));
    if (plan.num_ranks() > 16) continue;
    ++num_checked;
    testing::InProcessWorld world(plan.num_ranks());
    const ExchangeEngine engine = round % 2 == 0 ? ExchangeEngine::kCpu : ExchangeEngine::kDevice;
    world.run_all([&](int32_t rank) { check_rank(world, plan, rank, engine); });
    for (int32_t rank = 0; rank < plan.num_ranks(); ++rank) {
      const Bag& bag = plan.topology().bag(plan.topology().bag_of(Rank(rank)));
      EXPECT_LE(world.counts(rank).all_to_all, bag.num_ranks == 1 ? 0 : 4);  // two there, two of the backward
    }
  }
}

// A wide tensor beside three integers and one flag, as FLUX routes, and a segment of other rows.
TEST(WireLayout, NarrowColumnsDoNotNarrowTheWordsOfWideOnes) {
  Cases cases(33);
  for (int32_t round = 0; round < 10; ++round) {
    const Plan plan = cases.any_plan(cases.input(/*nested=*/true));
    const auto num_ranks = static_cast<size_t>(plan.num_ranks());
    std::vector<std::vector<int64_t>> sent(num_ranks), received(num_ranks);
    for (size_t r = 0; r < num_ranks; ++r) {
      const RouteTables route = make_route_tables(plan, Rank(static_cast<int32_t>(r)));
      const ExchangeTable* const tables[] = {&route.tokens, &route.sequences};
      const std::vector<PackedTable> packed = pack_tables(tables, ExchangeEngine::kCpu, at::kCPU);
      const int64_t tokens = route.tokens.send.num_rows, sequences = route.sequences.send.num_rows;
      ExchangeArguments arguments{.group = {}, .label = "route"};
      arguments.add(
          packed[0],
          {at::empty({tokens, 64}, at::kBFloat16), at::empty({tokens, 3}, at::kInt), at::empty({tokens}, at::kBool)},
          {HeadRole::kNone, HeadRole::kNone, HeadRole::kNone});
      arguments.add(packed[1], {at::empty({sequences, 3}, at::kFloat)}, {HeadRole::kNone});
      ExchangeCall call(arguments);
      EXPECT_EQ(call.segments()[0].slots[0].word_bytes, 16);
      EXPECT_EQ(call.segments()[0].slots[1].word_bytes, 4);
      EXPECT_EQ(call.segments()[0].slots[2].word_bytes, 1);
      EXPECT_EQ(call.segments()[1].slots[0].word_bytes, 4);
      for (const std::vector<WireBlock>& blocks : {call.sent_blocks(), call.received_blocks()}) {
        for (const WireBlock& block : blocks) {
          EXPECT_EQ(block.first_byte % 16, 0);
          EXPECT_EQ(block.row_bytes, block.segment == 0 ? 144 : 12);  // 128 + 12 + 1, in words of 16
          std::vector<int64_t> begins;
          block.end->for_each_slot(call.segments()[block.segment].slots, block.peer,
                                   [&](const Slot&, int64_t byte) { begins.push_back(byte); });
          EXPECT_EQ(begins, block.segment == 0 ? (std::vector<int64_t>{0, 128, 140}) : std::vector<int64_t>{0});
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

}  // namespace
}  // namespace knapformer
