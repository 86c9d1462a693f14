#include "knapformer/torch/exchange/duplicates.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace knapformer {
namespace {

TEST(Duplicates, SumRowsByTheScatterIndex) {
  const at::Tensor wire = at::arange(8, at::kDouble).view({4, 2});
  const at::Tensor index = at::tensor({0, 3, 2, 4, 4, 4}, at::kLong).view({3, 2});
  EXPECT_TRUE(at::equal(sum_rows(wire, index), at::tensor({6, 8, 4, 5, 0, 0}, at::kDouble).view({3, 2})));
  EXPECT_TRUE(at::equal(sum_rows(wire.narrow(0, 0, 0), index.fill_(0)), at::zeros({3, 2}, at::kDouble)));
}

TEST(Duplicates, SumHalfTypesInFloat) {
  const at::Tensor wire = at::ones({8, 1}, at::kBFloat16);
  wire[0] = 256;
  EXPECT_EQ(sum_rows(wire, at::arange(8).view({1, 8})).item<double>(), 264.0);  // 263, rounded once; 256 if each time
}

/// Rows 0 1 of this end meet peer 0, rows 1 3 meet peer 1.
Segment segment(const PackedTable& table, const at::Tensor& output) {
  Segment made{.send = {PackedEndView(table.send), HeadSharing::kSend, {}},
               .recv = {PackedEndView(table.recv), HeadSharing::kRecv, {}},
               .heads = {},
               .slots = {}};
  Slot& slot = made.slots.emplace_back();
  slot.output = output;
  slot.output_row_bytes = static_cast<int64_t>(output.nbytes()) / output.size(0);
  return made;
}

TEST(Duplicates, AddBlocksWhereverTheyBeginOnTheWire) {
  const ExchangeEnd end{.num_rows = 4,
                        .runs = {.values = {{0, 2}, {1, 1}, {3, 1}}, .offsets = {0, 1, 3}},
                        .peer_rows = {2, 2},
                        .has_duplicate_rows = true};
  const ExchangeTable table{.this_peer = 0, .num_peers = 2, .send = end, .recv = end};
  const PackedTable packed = pack_tables(std::vector{&table}, ExchangeEngine::kCpu, at::kCPU)[0];
  const at::Tensor output = at::empty({4, 2}, at::kDouble);
  Segment s = segment(packed, output);
  EXPECT_TRUE(s.sums(s.slots[0]));
  const at::Tensor wire = at::zeros({100}, at::kByte);  // rows of 16 bytes, each behind 3 of another slot
  for (const int32_t peer : {0, 1}) {
    const at::Tensor rows = at::arange(4, at::kDouble).view({2, 2}) + 10 * peer;
    const at::Tensor on_wire = wire.narrow(0, 0, 38).view({2, 19}).narrow(1, 3, 16);
    on_wire.copy_(rows.view(at::kByte));
    add_block(s.recv, s.slots[0], peer, on_wire);
  }
  EXPECT_TRUE(at::equal(s.slots[0].sum, at::tensor({0, 1, 12, 14, 0, 0, 12, 13}, at::kDouble).view({4, 2})));
  Segment half = segment(packed, at::empty({4, 2}, at::kBFloat16));
  add_block(half.recv, half.slots[0], 0, at::zeros({0, 4}, at::kByte));
  EXPECT_EQ(half.slots[0].sum.scalar_type(), at::kFloat);
}

}  // namespace
}  // namespace knapformer
