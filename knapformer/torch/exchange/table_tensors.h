// Exchange tables as exchanges take them: without the runs of rows, whose numbers lie in index tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "knapformer/core/plan/exchange_table.h"

namespace knapformer {

/// What copies rows into the buffers of an all-to-all, and out of them (copies.h).
enum class ExchangeEngine { kCpu, kDevice, kKernel };

/// One end of an exchange; members as ExchangeEnd's.
struct PackedEnd {
  int64_t num_rows = 0;
  bool heads_shared = false, all_rows = false, has_duplicate_rows = false;
  std::vector<int64_t> row_offsets;  // by peer, in wire order, and the end
  at::Tensor index;  // int64: the rows in wire order, once copied on the tensors' device; empty where all_rows

  int64_t peer_rows(int32_t peer) const { return row_offsets[peer + 1] - row_offsets[peer]; }
  /// The rows that meet `peer`, on the device; where not all rows do.
  at::Tensor index_of(int32_t peer) const { return index.narrow(0, row_offsets[peer], peer_rows(peer)); }
  const int64_t* index_at(int32_t peer) const { return index.const_data_ptr<int64_t>() + row_offsets[peer]; }
};

struct PackedTable {
  int32_t this_peer = 0, num_peers = 1;
  ExchangeEngine engine = ExchangeEngine::kCpu;
  int64_t step = 0;  // its number, by which ranks see that they follow the same (Fingerprint::step)
  std::shared_ptr<const PackedEnd> send, recv;

  PackedTable inverse() const;
};

/// Packs all tables of a step at once. Their index tensors are parts of one on the host, for an accelerator in pinned
/// memory, from where copy_index brings them to it.
std::vector<PackedTable> pack_tables(std::span<const ExchangeTable* const> tables, ExchangeEngine engine,
                                     at::Device device, int64_t step = 0);
/// Puts the device's index tensors into the tables of one pack_tables: by one copy on the present stream, which does
/// not block the host.
void copy_index(std::span<PackedTable> tables, at::Device device);

}  // namespace knapformer
