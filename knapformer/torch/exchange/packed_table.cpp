#include "knapformer/torch/exchange/packed_table.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "knapformer/core/util/error.h"

namespace knapformer {
namespace {

constexpr int64_t kTableMagic = 0x4b4e415045583036;  // "KNAPEX06"

// A run is read in place from the packed table.
static_assert(sizeof(RowRun) == 2 * sizeof(int64_t));

int64_t max_duplicates_of(const ExchangeEnd& end) {
  if (!end.has_duplicate_rows) return 1;
  std::vector<int64_t> counts(static_cast<size_t>(end.num_rows), 0);
  for (const RowRun& run : end.runs.values) {
    for (int64_t i = 0; i < run.num_rows; ++i) ++counts[static_cast<size_t>(run.first_row + i)];
  }
  return counts.empty() ? 1 : std::max<int64_t>(1, *std::max_element(counts.begin(), counts.end()));
}

}  // namespace

at::Tensor PackedEndView::pack(const ExchangeEnd& end, const ExchangeTable& table, ExchangeEngine engine,
                               int64_t step) {
  const auto peers = static_cast<size_t>(table.num_peers);
  const size_t size = kNumFields + 2 * (peers + 1) + 2 * end.runs.values.size();
  at::Tensor packed = at::empty({static_cast<int64_t>(size)}, at::kLong);
  int64_t* out = packed.mutable_data_ptr<int64_t>();
  out[kMagic] = kTableMagic;
  out[kNumRows] = end.num_rows;
  out[kThisPeer] = table.this_peer;
  out[kNumPeers] = table.num_peers;
  out[kHeadsShared] = end.heads_shared;
  out[kEngine] = static_cast<int64_t>(engine);
  out[kMaxDuplicates] = max_duplicates_of(end);
  out[kStep] = step;
  out[kSpeaker] = end.speaker;
  out[kNumWithoutRows] = end.without_rows.num;
  out[kIsWithoutRows] = end.without_rows.this_peer;
  out[kNumWithoutAnyRows] = end.without_any_rows.num;
  out[kIsWithoutAnyRows] = end.without_any_rows.this_peer;
  out += kNumFields;
  *out++ = 0;
  out = std::partial_sum(end.peer_rows.begin(), end.peer_rows.end(), out);
  out = std::copy(end.runs.offsets.begin(), end.runs.offsets.end(), out);
  const std::vector<RowRun>& runs = end.runs.values;
  if (!runs.empty()) std::memcpy(out, runs.data(), runs.size() * sizeof(RowRun));
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

std::span<const RowRun> PackedEndView::runs_of(int32_t peer) const {
  const auto peers = static_cast<size_t>(num_peers()), p = static_cast<size_t>(peer);
  const int64_t* offsets = row_offsets() + peers + 1;
  const auto* runs = reinterpret_cast<const RowRun*>(offsets + peers + 1);
  return {runs + offsets[p], static_cast<size_t>(offsets[p + 1] - offsets[p])};
}

void PackedEndView::append_index(std::vector<int64_t>& index) const {
  for (int32_t peer = 0; peer < num_peers(); ++peer) {
    for (const RowRun& run : runs_of(peer)) {
      for (int64_t i = 0; i < run.num_rows; ++i) index.push_back(run.first_row + i);
    }
  }
  if (!has_duplicates()) return;
  const size_t rows = index.size() - static_cast<size_t>(num_wire_rows()), scatter = index.size();
  const auto max_duplicates = static_cast<size_t>(field(kMaxDuplicates));
  index.resize(scatter + static_cast<size_t>(num_rows()) * max_duplicates, num_wire_rows());
  std::vector<size_t> num_places(static_cast<size_t>(num_rows()), 0);
  int64_t place = 0;
  const auto add_peer = [&](int32_t peer) {
    for (int64_t i = 0; i < peer_rows(peer); ++i, ++place) {
      const auto row = static_cast<size_t>(index[rows + static_cast<size_t>(row_offsets()[peer] + i)]);
      index[scatter + row * max_duplicates + num_places[row]++] = place;
    }
  };
  add_peer(this_peer());
  for (int32_t peer = 0; peer < num_peers(); ++peer) {
    if (peer != this_peer()) add_peer(peer);
  }
}

at::Tensor PackedEndView::scatter_index() const {
  return index_.narrow(0, num_wire_rows(), num_rows() * field(kMaxDuplicates))
      .view({num_rows(), field(kMaxDuplicates)});
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
      tensors.rows = at::empty({end.num_rows, 0}, at::TensorOptions().dtype(at::kByte).device(device));
      ends.emplace_back(&tensors, index.size());
      // A shared end needs no index: all its rows, in order, meet every peer.
      if (engine != ExchangeEngine::kCpu && !end.heads_shared) PackedEndView(tensors).append_index(index);
    }
  }
  at::Tensor host =
      at::empty({static_cast<int64_t>(index.size())}, at::TensorOptions(at::kLong).pinned_memory(!device.is_cpu()));
  if (!index.empty()) std::memcpy(host.mutable_data_ptr<int64_t>(), index.data(), index.size() * sizeof(int64_t));
  const at::Tensor on_device = device.is_cpu() ? host : host.to(device, /*non_blocking=*/true);
  for (size_t i = 0; i < ends.size(); ++i) {
    const size_t begin = ends[i].second, end = i + 1 < ends.size() ? ends[i + 1].second : index.size();
    ends[i].first->index = on_device.narrow(0, static_cast<int64_t>(begin), static_cast<int64_t>(end - begin));
  }
  return packed;
}

}  // namespace knapformer
