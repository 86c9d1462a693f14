#include "knapformer/torch/exchange/packed_table.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "knapformer/core/util/error.h"

namespace knapformer {
namespace {

/// Peer 1 of 3: rows 0 1 4 to peer 0, row 2 to itself, rows 1 3 to peer 2; row 1 goes to two. Whole at both ends.
ExchangeTable table() {
  const ExchangeEnd send{.num_rows = 5,
                         .runs = {.values = {{0, 2}, {4, 1}, {2, 1}, {1, 1}, {3, 1}}, .offsets = {0, 2, 3, 5}},
                         .peer_rows = {3, 1, 2},
                         .has_duplicate_rows = true};
  const ExchangeEnd recv{
      .num_rows = 3, .runs = {.values = {{1, 2}, {0, 1}}, .offsets = {0, 1, 2, 2}}, .peer_rows = {2, 1, 0}};
  return {.this_peer = 1, .num_peers = 3, .send = send, .recv = recv};
}

std::vector<int64_t> flat_list(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.flatten();
  return {flat.const_data_ptr<int64_t>(), flat.const_data_ptr<int64_t>() + flat.numel()};
}

TEST(PackedTable, KeepsWhatATableSays) {
  const ExchangeTable t = table();
  for (const ExchangeEngine engine : {ExchangeEngine::kCpu, ExchangeEngine::kDevice}) {
    const PackedTable packed = pack_tables(std::vector{&t}, engine, at::kCPU)[0];
    for (const auto& [end, tensors] : {std::pair(&t.send, &packed.send), std::pair(&t.recv, &packed.recv)}) {
      const PackedEndView view(*tensors);
      EXPECT_EQ(view.num_rows(), end->num_rows);
      EXPECT_EQ(tensors->rows.size(0), end->num_rows);
      EXPECT_EQ(tensors->rows.numel(), 0);
      EXPECT_EQ(view.this_peer(), 1);
      EXPECT_EQ(view.num_peers(), 3);
      EXPECT_EQ(view.has_duplicates(), end->has_duplicate_rows);
      EXPECT_EQ(view.heads_shared(), end->heads_shared);
      EXPECT_EQ(view.engine(), engine);
      for (int32_t peer = 0; peer < 3; ++peer) {
        EXPECT_EQ(view.peer_rows(peer), end->peer_rows[static_cast<size_t>(peer)]);
      }
    }
    EXPECT_EQ(PackedEndView(packed.inverse().send).num_rows(), 3);
  }
}

TEST(PackedTable, IndicesListWirePlaces) {
  const ExchangeTable t = table();
  const PackedTable packed = pack_tables(std::vector{&t, &t}, ExchangeEngine::kDevice, at::kCPU)[1];
  const PackedEndView send(packed.send), recv(packed.recv);
  EXPECT_EQ(flat_list(send.index_of(0)), (std::vector<int64_t>{0, 1, 4}));
  EXPECT_EQ(flat_list(send.index_of(1)), (std::vector<int64_t>{2}));
  EXPECT_EQ(flat_list(send.index_of(2)), (std::vector<int64_t>{1, 3}));
  EXPECT_EQ(flat_list(recv.index_of(1)), (std::vector<int64_t>{0}));
}

TEST(PackedTable, RefusesOtherTensors) {
  for (const at::Tensor& tensor : {at::Tensor(), at::zeros({20}, at::kLong), at::zeros({2}, at::kLong),
                                   at::zeros({20}, at::kInt), at::zeros({4, 5}, at::kLong)}) {
    EXPECT_THROW(PackedEndView({.table = tensor, .rows = {}, .index = {}}), ArgumentError);
  }
}

}  // namespace
}  // namespace knapformer
