// Where columns lie in the buffer.
#include "knapformer/torch/exchange/call.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/core/cases.h"

namespace knapformer {
namespace {

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
      ExchangeArguments arguments{.group = {}, .call = "route"};
      arguments.add(
          packed[0],
          {at::empty({tokens, 64}, at::kBFloat16), at::empty({tokens, 3}, at::kInt), at::empty({tokens}, at::kBool)},
          {HeadRole::kNone, HeadRole::kNone, HeadRole::kNone});
      arguments.add(packed[1], {at::empty({sequences, 3}, at::kFloat)}, {HeadRole::kNone});
      const ExchangeCall call(arguments);
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

}  // namespace
}  // namespace knapformer
