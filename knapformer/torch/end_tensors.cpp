#include "knapformer/torch/end_tensors.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>

#include "knapformer/core/error.h"

namespace knapformer {
namespace {

constexpr int64_t kTableMagic = 0x4b4e415045583031;  // "KNAPEX01"

// A run is read in place from the packed table.
static_assert(sizeof(RowRun) == 2 * sizeof(int64_t));

int64_t most_repeats(const ExchangeEnd& end) {
  if (!end.rows_repeat) return 1;
  std::vector<int64_t> repeats(static_cast<size_t>(end.num_rows), 0);
  for (const RowRun& run : end.runs) {
    for (int64_t i = 0; i < run.num_rows; ++i) ++repeats[static_cast<size_t>(run.first_row + i)];
  }
  return repeats.empty() ? 1 : std::max<int64_t>(1, *std::max_element(repeats.begin(), repeats.end()));
}

at::TensorOptions int64_cpu() { return at::TensorOptions().dtype(at::kLong).device(at::kCPU); }

}  // namespace

at::Tensor EndView::pack(const ExchangeEnd& end, const ExchangeTable& table, HeadGroup group, ExchangeEngine engine,
                         int64_t plan) {
  const auto peers = static_cast<size_t>(table.num_peers);
  int64_t num_wire_rows = 0;
  for (const int64_t rows : end.peer_rows) num_wire_rows += rows;
  const size_t size = kNumFields + peers + (peers + 1) + 2 * end.runs.size();
  at::Tensor packed = at::empty({static_cast<int64_t>(size)}, int64_cpu());
  int64_t* out = packed.mutable_data_ptr<int64_t>();
  out[kMagic] = kTableMagic;
  out[kNumRows] = end.num_rows;
  out[kThisPeer] = table.this_peer;
  out[kNumPeers] = table.num_peers;
  out[kHeadsShared] = end.heads_shared;
  out[kRowsRepeat] = end.rows_repeat;
  out[kEngine] = static_cast<int64_t>(engine);
  out[kFirstPeer] = group.first_peer;
  out[kDegree] = group.degree;
  out[kNumWireRows] = num_wire_rows;
  out[kMaxRepeats] = most_repeats(end);
  out[kPlan] = plan;
  out += kNumFields;
  out = std::copy(end.peer_rows.begin(), end.peer_rows.end(), out);
  out = std::copy(end.run_offsets.begin(), end.run_offsets.end(), out);
  if (!end.runs.empty()) std::memcpy(out, end.runs.data(), end.runs.size() * sizeof(RowRun));
  return packed;
}

EndView::EndView(const at::Tensor& table) {
  if (!table.defined() || !table.is_cpu() || table.scalar_type() != at::kLong || table.dim() != 1 ||
      !table.is_contiguous() || table.numel() < static_cast<int64_t>(kNumFields) ||
      table.const_data_ptr<int64_t>()[kMagic] != kTableMagic) {
    throw ArgumentError("exchange: got a table that was not made by make_table_tensors");
  }
  data_ = {table.const_data_ptr<int64_t>(), static_cast<size_t>(table.numel())};
}

std::span<const RowRun> EndView::runs_of(int32_t peer) const {
  const auto peers = static_cast<size_t>(num_peers()), p = static_cast<size_t>(peer);
  const int64_t* offsets = data_.data() + kNumFields + peers;
  const auto* runs = reinterpret_cast<const RowRun*>(offsets + peers + 1);
  return {runs + offsets[p], static_cast<size_t>(offsets[p + 1] - offsets[p])};
}

void EndView::write_index(const ExchangeEnd& end, int32_t this_peer, int64_t max_repeats, std::vector<int64_t>& index) {
  int64_t num_wire_rows = 0;
  for (const int64_t rows : end.peer_rows) num_wire_rows += rows;
  const size_t take = index.size(), put = take + static_cast<size_t>(num_wire_rows);
  index.resize(put + static_cast<size_t>(end.num_rows * max_repeats), num_wire_rows);
  std::vector<int64_t> num_places(static_cast<size_t>(max_repeats > 1 ? end.num_rows : 0), 0);

  const int64_t own_rows = end.peer_rows[static_cast<size_t>(this_peer)];
  int64_t next = 0;  // of the others' rows
  for (int32_t peer = 0; peer < static_cast<int32_t>(end.peer_rows.size()); ++peer) {
    const bool own = peer == this_peer;
    int64_t taken = own ? num_wire_rows - own_rows : next;
    int64_t place = own ? 0 : own_rows + next;
    for (const RowRun& run : end.runs_of(peer)) {
      for (int64_t row = run.first_row; row < run.first_row + run.num_rows; ++row, ++taken, ++place) {
        index[take + static_cast<size_t>(taken)] = row;
        const int64_t repeat = max_repeats > 1 ? num_places[static_cast<size_t>(row)]++ : 0;
        index[put + static_cast<size_t>(row * max_repeats + repeat)] = place;
      }
    }
    if (!own) next += end.peer_rows[static_cast<size_t>(peer)];
  }
}

at::Tensor EndView::take(const at::Tensor& index) const { return index.narrow(0, 0, num_wire_rows()); }

at::Tensor EndView::put(const at::Tensor& index) const {
  return index.narrow(0, num_wire_rows(), num_rows() * max_repeats()).view({num_rows(), max_repeats()});
}

std::vector<TableTensors> make_table_tensors(std::span<const TableSpec> specs, ExchangeEngine engine, at::Device device,
                                             int64_t plan) {
  KNAPFORMER_ASSERT(engine == ExchangeEngine::kIndex || device.is_cpu());
  std::vector<TableTensors> tables(specs.size());
  std::vector<int64_t> index;
  std::vector<std::pair<EndTensors*, size_t>> ends;  // and where their index begins
  const at::TensorOptions bytes = at::TensorOptions().dtype(at::kByte).device(device);
  for (size_t i = 0; i < specs.size(); ++i) {
    const auto& [table, group] = specs[i];
    for (const bool is_send : {true, false}) {
      const ExchangeEnd& end = is_send ? table.send : table.recv;
      EndTensors& tensors = is_send ? tables[i].send : tables[i].recv;
      tensors.table = EndView::pack(end, table, group, engine, plan);
      tensors.rows = at::empty({end.num_rows, 0}, bytes);
      ends.emplace_back(&tensors, index.size());
      // A shared end needs none: the same rows, in order, meet every peer.
      if (engine == ExchangeEngine::kIndex && !end.heads_shared) {
        EndView::write_index(end, table.this_peer, EndView(tensors.table).max_repeats(), index);
      }
    }
  }
  at::Tensor host = at::empty({static_cast<int64_t>(index.size())}, int64_cpu().pinned_memory(!device.is_cpu()));
  if (!index.empty()) std::memcpy(host.mutable_data_ptr<int64_t>(), index.data(), index.size() * sizeof(int64_t));
  const at::Tensor on_device = device.is_cpu() ? host : host.to(device, /*non_blocking=*/true);
  for (size_t i = 0; i < ends.size(); ++i) {
    const size_t begin = ends[i].second, end = i + 1 < ends.size() ? ends[i + 1].second : index.size();
    ends[i].first->index = on_device.narrow(0, static_cast<int64_t>(begin), static_cast<int64_t>(end - begin));
  }
  return tables;
}

}  // namespace knapformer
