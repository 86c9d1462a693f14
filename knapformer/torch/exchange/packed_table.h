// Exchange tables as tensors: the form in which they are arguments of the op knapformer::exchange.
//
// Splits and what else the host reads live in a packed CPU tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "knapformer/core/plan/exchange_table.h"

namespace knapformer {

/// What copies rows into the buffers of an all-to-all, and out of them.
enum class ExchangeEngine {
  kCpu,     // memcpy; CPU tensors only
  kDevice,  // ATen's index operations with index tensors on the tensors' device; any device
  kKernel,  // the packing kernel, one launch a side; devices that have it (copies.h)
};

/// One end of an exchange.
struct PackedEnd {
  at::Tensor table;  // int64 CPU; PackedEndView reads it
  at::Tensor index;  // int64: the rows in wire order, once copied on the tensors' device; empty where all rows, in
                     // order, or none meet each peer, as in Ulysses before attention
};

struct PackedTable {
  PackedEnd send;
  PackedEnd recv;

  PackedTable inverse() const { return {.send = recv, .recv = send}; }
};

/// Packs all tables of a step at once. Their index tensors are parts of one on the host, for an accelerator in pinned
/// memory, from where copy_index brings them to it. step: its number, by which ranks see that they follow the same
/// (Fingerprint::step).
std::vector<PackedTable> pack_tables(std::span<const ExchangeTable* const> tables, ExchangeEngine engine,
                                     at::Device device, int64_t step = 0);
/// Puts the device's index tensors into the tables of one pack_tables: by one copy on the present stream, which does
/// not block the host.
void copy_index(std::span<PackedTable* const> tables, at::Device device);

/// Reads PackedEnd::table in place, and must not outlive it.
class PackedEndView {
 public:
  /// Throws where the end is not one that pack_tables made.
  explicit PackedEndView(const PackedEnd& end);

  int64_t num_rows() const { return field(kNumRows); }
  int32_t this_peer() const { return static_cast<int32_t>(field(kThisPeer)); }
  int32_t num_peers() const { return static_cast<int32_t>(field(kNumPeers)); }
  bool heads_shared() const { return field(kHeadsShared) != 0; }
  bool has_duplicates() const { return field(kHasDuplicates) != 0; }
  ExchangeEngine engine() const { return static_cast<ExchangeEngine>(field(kEngine)); }
  int64_t step() const { return field(kStep); }
  int32_t speaker() const { return static_cast<int32_t>(field(kSpeaker)); }
  PeersWithoutRows without_rows() const { return peers_at(kNumWithoutRows); }
  PeersWithoutRows without_any_rows() const { return peers_at(kNumWithoutAnyRows); }
  int64_t peer_rows(int32_t peer) const { return row_offsets()[peer + 1] - row_offsets()[peer]; }

  /// Whether the rows that meet a peer are listed; otherwise they are all rows, in order.
  bool has_index() const { return field(kAllRows) == 0; }
  /// The rows that meet `peer`, on the device; where there is an index.
  at::Tensor index_of(int32_t peer) const { return index_.narrow(0, row_offsets()[peer], peer_rows(peer)); }
  const int64_t* index_at(int32_t peer) const { return index_.const_data_ptr<int64_t>() + row_offsets()[peer]; }

 private:
  friend std::vector<PackedTable> pack_tables(std::span<const ExchangeTable* const>, ExchangeEngine, at::Device,
                                              int64_t);
  static at::Tensor pack(const ExchangeEnd& end, const ExchangeTable& table, ExchangeEngine engine, int64_t step);
  const int64_t* row_offsets() const { return data_.data() + kNumFields; }

  enum Field : size_t {
    kMagic,
    kNumRows,
    kThisPeer,
    kNumPeers,
    kHeadsShared,
    kAllRows,
    kEngine,
    kHasDuplicates,
    kStep,
    kSpeaker,
    kNumWithoutRows,  // then whether this peer is one of them
    kIsWithoutRows,
    kNumWithoutAnyRows,  // likewise
    kIsWithoutAnyRows,
    kNumFields,  // then row offsets (num_peers + 1)
  };
  int64_t field(Field f) const { return data_[f]; }
  PeersWithoutRows peers_at(Field num) const {
    return {.num = static_cast<int32_t>(data_[num]), .this_peer = data_[num + 1] != 0};
  }

  std::span<const int64_t> data_;
  at::Tensor index_;
};

}  // namespace knapformer
