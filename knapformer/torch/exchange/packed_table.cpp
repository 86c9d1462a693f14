#include "knapformer/torch/exchange/packed_table.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <numeric>

#include "knapformer/core/util/error.h"

namespace knapformer {
namespace {

constexpr int64_t kTableMagic = 0x4b4e415045583038;  // "KNAPEX08"

}  // namespace

at::Tensor PackedEndView::pack(const ExchangeEnd& end, const ExchangeTable& table, ExchangeEngine engine,
                               int64_t step) {
  const auto peers = static_cast<size_t>(table.num_peers);
  const size_t size = kNumFields + peers + 1;
  at::Tensor packed = at::empty({static_cast<int64_t>(size)}, at::kLong);
  int64_t* out = packed.mutable_data_ptr<int64_t>();
  out[kMagic] = kTableMagic;
  out[kNumRows] = end.num_rows;
  out[kThisPeer] = table.this_peer;
  out[kNumPeers] = table.num_peers;
  out[kHeadsShared] = end.heads_shared;
  out[kAllRows] = end.all_rows;
  out[kEngine] = static_cast<int64_t>(engine);
  out[kHasDuplicates] = end.has_duplicate_rows;
  out[kStep] = step;
  out[kSpeaker] = end.speaker;
  out[kNumWithoutRows] = end.without_rows.num;
  out[kIsWithoutRows] = end.without_rows.this_peer;
  out[kNumWithoutAnyRows] = end.without_any_rows.num;
  out[kIsWithoutAnyRows] = end.without_any_rows.this_peer;
  out += kNumFields;
  *out++ = 0;
  std::partial_sum(end.peer_rows.begin(), end.peer_rows.end(), out);
  return packed;
}

PackedEndView::PackedEndView(const PackedEnd& end) : index_(end.index) {
  const at::Tensor& table = end.table;
  if (!table.defined() || !table.is_cpu() || table.scalar_type() != at::kLong || table.dim() != 1 ||
      !table.is_contiguous() || table.numel() < static_cast<int64_t>(kNumFields) ||
      table.const_data_ptr<int64_t>()[kMagic] != kTableMagic) {
    throw ArgumentError("exchange: got a table that was not made by pack_tables");
  }
  data_ = {table.const_data_ptr<int64_t>(), static_cast<size_t>(table.numel())};
}

std::vector<PackedTable> pack_tables(std::span<const ExchangeTable* const> tables, ExchangeEngine engine,
                                     at::Device device, int64_t step) {
  KNAPFORMER_ASSERT(engine != ExchangeEngine::kCpu || device.is_cpu());
  std::vector<PackedTable> packed(tables.size());
  std::vector<int64_t> index;
  std::vector<std::pair<PackedEnd*, size_t>> ends;  // and where their index begins
  for (size_t i = 0; i < tables.size(); ++i) {
    for (const bool is_send : {true, false}) {
      const ExchangeEnd& end = is_send ? tables[i]->send : tables[i]->recv;
      PackedEnd& tensors = is_send ? packed[i].send : packed[i].recv;
      tensors.table = PackedEndView::pack(end, *tables[i], engine, step);
      ends.emplace_back(&tensors, index.size());
      if (end.all_rows) continue;
      for (const RowRun& run : end.runs.values) {
        index.resize(index.size() + static_cast<size_t>(run.num_rows));
        std::iota(index.end() - run.num_rows, index.end(), run.first_row);
      }
    }
  }
  const at::Tensor host =
      at::empty({static_cast<int64_t>(index.size())}, at::TensorOptions(at::kLong).pinned_memory(!device.is_cpu()));
  std::ranges::copy(index, host.mutable_data_ptr<int64_t>());
  for (size_t i = 0; i < ends.size(); ++i) {
    const size_t begin = ends[i].second, end = i + 1 < ends.size() ? ends[i + 1].second : index.size();
    ends[i].first->index = host.narrow(0, static_cast<int64_t>(begin), static_cast<int64_t>(end - begin));
  }
  return packed;
}

void copy_index(std::span<PackedTable* const> tables, at::Device device) {
  const at::Tensor& last = tables.back()->recv.index;
  const at::Tensor all =
      last.as_strided({last.storage_offset() + last.numel()}, {1}, 0).to(device, /*non_blocking=*/true);
  for (PackedTable* table : tables) {
    for (at::Tensor* index : {&table->send.index, &table->recv.index})
      *index = all.narrow(0, index->storage_offset(), index->numel());
  }
}

}  // namespace knapformer
