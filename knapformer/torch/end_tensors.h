// Exchange tables as tensors: the form in which they are arguments of the op knapformer::exchange.
//
// Tensors, since tables change every step while a compiled graph does not: splits and runs live in a packed CPU tensor
// that the graph only passes on, and row counts in the size of a tensor without bytes, so that no output shape depends
// on data.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "knapformer/core/exchange_table.h"

namespace knapformer {

/// How rows are taken and put.
enum class ExchangeEngine {
  kRuns,   // runs of rows by memcpy; CPU tensors only
  kIndex,  // ATen's index operations with index tensors on the tensors' device; any device
};

/// One end of an exchange, for the op.
struct EndTensors {
  at::Tensor table;  // int64 CPU, packed: EndView reads it
  at::Tensor rows;   // (num_rows, 0) on the tensors' device: its size tells a traced graph the rows of this end
  at::Tensor index;  // int64 on the tensors' device; empty for ExchangeEngine::kRuns. See EndView::index_parts
};

/// Of EndTensors, where they are arguments of the op.
constexpr size_t kTensorsPerEnd = 3;

struct TableTensors {
  EndTensors send;
  EndTensors recv;

  TableTensors inverse() const { return {.send = recv, .recv = send}; }
};

/// The ranks that share heads: `degree` consecutive peers.
struct HeadGroup {
  int32_t first_peer = 0;
  int32_t degree = 1;
};

/// A table on its way into tensors.
struct TableSpec {
  const ExchangeTable& table;
  HeadGroup head_group;
};

/// All tables of a step at once: index tensors of all of them reach the device in one copy from pinned memory, which
/// does not block the host. plan: the number that EndView::plan gives back.
std::vector<TableTensors> make_table_tensors(std::span<const TableSpec> specs, ExchangeEngine engine, at::Device device,
                                             int64_t plan = 0);

/// Reads EndTensors::table in place.
class EndView {
 public:
  /// Throws where the tensor is not one that make_table_tensors made.
  explicit EndView(const at::Tensor& table);

  int64_t num_rows() const { return field(kNumRows); }
  int32_t this_peer() const { return static_cast<int32_t>(field(kThisPeer)); }
  int32_t num_peers() const { return static_cast<int32_t>(field(kNumPeers)); }
  bool heads_shared() const { return field(kHeadsShared) != 0; }
  bool rows_repeat() const { return field(kRowsRepeat) != 0; }
  ExchangeEngine engine() const { return static_cast<ExchangeEngine>(field(kEngine)); }
  int64_t plan() const { return field(kPlan); }
  HeadGroup head_group() const {
    return {.first_peer = static_cast<int32_t>(field(kFirstPeer)), .degree = static_cast<int32_t>(field(kDegree))};
  }
  /// Rows on the wire, those to or from this rank itself included.
  int64_t num_wire_rows() const { return field(kNumWireRows); }
  /// The most wire rows that one row meets (1 where rows do not repeat).
  int64_t max_repeats() const { return field(kMaxRepeats); }

  int64_t peer_rows(int32_t peer) const { return data_[kNumFields + static_cast<size_t>(peer)]; }
  /// In wire order.
  std::span<const RowRun> runs_of(int32_t peer) const;

  /// EndTensors::index of a whole end, for ExchangeEngine::kIndex:
  /// `take`: (num_wire_rows), the row at each place of the sending wire: rows for others by peer, then the own ones;
  /// `put`: (num_rows, max_repeats), the places of each row on the receiving wire: own rows, then those of others by
  /// peer. num_wire_rows fills up where a row has fewer places.
  static void write_index(const ExchangeEnd& end, int32_t this_peer, int64_t max_repeats, std::vector<int64_t>& index);
  at::Tensor take(const at::Tensor& index) const;
  at::Tensor put(const at::Tensor& index) const;

  static at::Tensor pack(const ExchangeEnd& end, const ExchangeTable& table, HeadGroup group, ExchangeEngine engine,
                         int64_t plan);

 private:
  enum Field : size_t {
    kMagic,
    kNumRows,
    kThisPeer,
    kNumPeers,
    kHeadsShared,
    kRowsRepeat,
    kEngine,
    kFirstPeer,
    kDegree,
    kNumWireRows,
    kMaxRepeats,
    kPlan,
    kNumFields,  // then peer_rows (num_peers), run offsets (num_peers + 1), runs (first row, rows)
  };
  int64_t field(Field f) const { return data_[f]; }

  std::span<const int64_t> data_;
};

}  // namespace knapformer
