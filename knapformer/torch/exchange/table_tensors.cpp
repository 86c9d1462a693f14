#include "knapformer/torch/exchange/table_tensors.h"

#include <ATen/ops/empty.h>

#include <numeric>
#include <utility>

#include "knapformer/core/util/error.h"

namespace knapformer {

PackedTable PackedTable::inverse() const {
  PackedTable swapped = *this;
  std::swap(swapped.send, swapped.recv);
  return swapped;
}

std::vector<PackedTable> pack_tables(std::span<const ExchangeTable* const> tables, ExchangeEngine engine,
                                     at::Device device, int64_t step) {
  KNAPFORMER_ASSERT(engine != ExchangeEngine::kCpu || device.is_cpu());
  const auto num_listed = [](const ExchangeEnd& end) {
    return end.all_rows ? 0 : std::accumulate(end.peer_rows.begin(), end.peer_rows.end(), int64_t{0});
  };
  int64_t num_rows = 0;
  for (const ExchangeTable* table : tables) num_rows += num_listed(table->send) + num_listed(table->recv);
  const at::Tensor all = at::empty({num_rows}, at::TensorOptions(at::kLong).pinned_memory(!device.is_cpu()));
  int64_t* next = all.mutable_data_ptr<int64_t>();
  int64_t first = 0;
  const auto pack = [&](const ExchangeEnd& end) {
    PackedEnd packed{.num_rows = end.num_rows,
                     .heads_shared = end.heads_shared,
                     .all_rows = end.all_rows,
                     .has_duplicate_rows = end.has_duplicate_rows,
                     .row_offsets = {0},
                     .index = all.narrow(0, first, num_listed(end))};
    for (const int64_t rows : end.peer_rows) packed.row_offsets.push_back(packed.row_offsets.back() + rows);
    first += packed.index.numel();
    for (size_t run = 0; run < end.runs.values.size() && !end.all_rows; ++run) {
      const auto [first_row, count] = end.runs.values[run];
      std::iota(next, next + count, first_row);
      next += count;
    }
    return std::make_shared<const PackedEnd>(std::move(packed));
  };
  std::vector<PackedTable> packed;
  for (const ExchangeTable* table : tables) {
    packed.push_back({.this_peer = table->this_peer,
                      .num_peers = table->num_peers,
                      .engine = engine,
                      .step = step,
                      .send = pack(table->send),
                      .recv = pack(table->recv)});
  }
  return packed;
}

void copy_index(std::span<PackedTable> tables, at::Device device) {
  const at::Tensor& last = tables.back().recv->index;
  const at::Tensor all =
      last.as_strided({last.storage_offset() + last.numel()}, {1}, 0).to(device, /*non_blocking=*/true);
  for (PackedTable& table : tables) {
    for (auto* end : {&table.send, &table.recv}) {
      PackedEnd on_device = **end;
      on_device.index = all.narrow(0, on_device.index.storage_offset(), on_device.index.numel());
      *end = std::make_shared<const PackedEnd>(std::move(on_device));
    }
  }
}

}  // namespace knapformer
