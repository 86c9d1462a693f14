// Copies of rows, and sums of duplicates, as work for the packing kernel (packing_kernel.h). Every byte is read once
// and written once on each side of an exchange.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>

#include "knapformer/core/util/error.h"
#include "knapformer/torch/exchange/engine.h"
#include "knapformer/torch/exchange/packing_kernel.h"
#include "knapformer/torch/exchange/packing_op.h"

namespace knapformer {
namespace {

using packing::Address;

Address address_of(const void* pointer) { return reinterpret_cast<Address>(pointer); }

/// The type by which numbers of this dtype are added; for complex ones, that of each half. None: the kernel does not.
std::optional<packing::Item> item_of(at::ScalarType type) {
  switch (c10::isComplexType(type) ? c10::toRealValueType(type) : type) {
    case at::kFloat:
      return packing::Item::kFloat;
    case at::kDouble:
      return packing::Item::kDouble;
    case at::kHalf:
      return packing::Item::kHalf;
    case at::kBFloat16:
      return packing::Item::kBFloat16;
    default:
      return std::nullopt;
  }
}

int64_t item_bytes_of(packing::Item item) {
  return item == packing::Item::kDouble ? 8 : item == packing::Item::kFloat ? 4 : 2;
}

int to_int(int64_t value) {
  KNAPFORMER_ASSERT(value >= 0 && value <= std::numeric_limits<int>::max());
  return static_cast<int>(value);
}

/// In the memory that the kernel sees: row i lies at first + index[i] * stride. 0: in order.
Address index_address(const Rows& rows) { return rows.end == nullptr ? 0 : address_of(rows.end->index_at(rows.peer)); }

/// The work of one launch.
class WorkList {
 public:
  void copy(const RowCopy& copy) {
    const auto& [from, to, num_bytes, num_rows] = copy;
    const auto places = static_cast<int64_t>(address_of(from.first) | address_of(to.first));
    const int64_t word = std::gcd(packing_word(num_bytes, places), std::gcd(from.stride, to.stride));
    copies_.push_back({.from = address_of(from.first),
                       .to = address_of(to.first),
                       .from_index = index_address(from),
                       .to_index = index_address(to),
                       .from_stride = from.stride,
                       .to_stride = to.stride,
                       .num_words = to_int(num_bytes / word),
                       .word_bytes = to_int(word),
                       .num_rows = to_int(num_rows)});
    num_bytes_ += num_bytes * num_rows;
  }

  /// sum: with the place of its result, its places, item and rows set. sources: those of this sum alone.
  void add(packing::Sum sum, const std::vector<packing::Source>& sources, int64_t num_bytes) {
    sum.first_source = to_int(static_cast<int64_t>(sources_.size()));
    sum.num_sources = to_int(static_cast<int64_t>(sources.size()));
    sum.num_items = to_int(num_bytes / item_bytes_of(sum.item));
    if (sum.num_items == 0 || sum.num_rows == 0) return;
    sources_.insert(sources_.end(), sources.begin(), sources.end());
    sums_.push_back(sum);
    num_bytes_ += num_bytes * sum.num_rows * std::max(1, std::max(sum.max_places, sum.num_sources));
  }

  /// One launch, or none where there is nothing to do.
  void launch(const at::Tensor& wire) {
    if (copies_.empty() && sums_.empty()) return;
    int64_t num_tiles = 0;
    const auto number_tiles = [&](int64_t items, int& first_tile) {
      first_tile = to_int(num_tiles);
      num_tiles += (items + packing::kTile - 1) / packing::kTile;
    };
    for (packing::Copy& c : copies_) number_tiles(int64_t{c.num_rows} * c.num_words, c.first_tile);
    for (packing::Sum& s : sums_) number_tiles(int64_t{s.num_rows} * s.num_items, s.first_tile);

    const packing::Work work{.num_copies = to_int(static_cast<int64_t>(copies_.size())),
                             .num_sums = to_int(static_cast<int64_t>(sums_.size())),
                             .num_sources = to_int(static_cast<int64_t>(sources_.size())),
                             .num_tiles = to_int(num_tiles)};
    const int64_t num_bytes = work.sources_at() + work.num_sources * static_cast<int64_t>(sizeof(packing::Source));
    // A list that does not fit into the launch's arguments is copied to the device first, without a wait.
    const bool by_table = num_bytes > packing::kMaxArgumentBytes && !wire.is_cpu();
    at::Tensor list = at::empty({num_bytes}, at::TensorOptions(at::kByte).pinned_memory(by_table));
    auto* bytes = static_cast<std::byte*>(list.mutable_data_ptr());
    const auto write = [&](int64_t at_byte, const void* from, size_t size) {
      if (size > 0) std::memcpy(bytes + at_byte, from, size);
    };
    write(0, &work, sizeof(work));
    write(packing::Work::kCopiesAt, copies_.data(), copies_.size() * sizeof(packing::Copy));
    write(work.sums_at(), sums_.data(), sums_.size() * sizeof(packing::Sum));
    write(work.sources_at(), sources_.data(), sources_.size() * sizeof(packing::Source));
    move_rows(wire, by_table ? list.to(wire.device(), /*non_blocking=*/true) : list, num_tiles, num_bytes_);
  }

 private:
  /// The widest word that divides a number of bytes, and addresses.
  static int64_t packing_word(int64_t num_bytes, int64_t addresses) {
    const int64_t all = num_bytes | addresses;
    return std::min(all & -all, kMaxWordBytes);
  }

  std::vector<packing::Copy> copies_;
  std::vector<packing::Sum> sums_;
  std::vector<packing::Source> sources_;
  int64_t num_bytes_ = 0;
};

/// What arrived for a slot, and where: the own rows, then those of others by peer.
struct Arrived {
  int32_t peer = 0;
  Rows rows;
  int64_t num_rows = 0;
};

std::vector<Arrived> arrived_for(ExchangeCall& call, const Segment& segment, const Slot& slot) {
  std::vector<Arrived> all;
  for (const WireBlock& block : call.received_blocks()) {
    if (&call.slot_of(block) != &slot || block.num_rows == 0) continue;
    // Own rows are read from the input, where their columns may lie apart (add_rows).
    const bool own = block.peer == call.this_peer();
    all.push_back({.peer = block.peer,
                   .rows = own ? rows_of(slot, segment.send, block.peer) : rows_on_wire(call, block),
                   .num_rows = block.num_rows});
  }
  return all;
}

/// Adds sums for `num_bytes` of each row of a slot's output, from `byte` on. sum: what is not the same for all sums.
void add_sum(WorkList& work, const Slot& slot, int64_t byte, int64_t num_bytes, packing::Sum sum,
             const std::vector<packing::Source>& sources) {
  sum.to = address_of(slot.output.mutable_data_ptr()) + static_cast<Address>(byte);
  sum.to_stride = slot.output_row_bytes;
  sum.item = *item_of(slot.output.scalar_type());
  sum.num_rows = to_int(slot.output.size(0));
  work.add(sum, sources, num_bytes);
}

packing::Source source_of(const Rows& rows, int64_t byte, int64_t first_place = 0) {
  return {.from = address_of(rows.first + byte),
          .from_index = index_address(rows),
          .from_stride = rows.stride,
          .first_place = first_place};
}

/// Adds the sums of a slot of which a row of the output has several places on the wire.
void add_rows(WorkList& work, const Segment& segment, const Slot& slot, const std::vector<Arrived>& all) {
  const at::Tensor scatter = segment.recv.scatter_index();
  const int32_t own = segment.send.this_peer();
  const auto add = [&](int64_t own_byte, int64_t byte, int64_t num_bytes) {
    std::vector<packing::Source> sources;
    int64_t first_place = 0;
    for (const Arrived& from : all) {
      sources.push_back(source_of(from.rows, from.peer == own ? own_byte : byte, first_place));
      first_place += from.num_rows;
    }
    add_sum(work, slot, byte, num_bytes,
            {.places = address_of(scatter.const_data_ptr()),
             .end_place = segment.recv.num_wire_rows(),
             .max_places = to_int(scatter.size(1))},
            sources);
  };
  if (!segment.send.heads_shared()) return add(0, 0, slot.output_row_bytes);
  int64_t byte = 0;
  segment.send.for_each_column_run(slot, own, [&](ColumnRun run) {
    add(run.first_byte, byte, run.num_bytes);
    byte += run.num_bytes;
  });
}

/// Adds the sums of a slot of which a head came from several peers. Each of these sent all rows.
void add_heads(WorkList& work, const Segment& segment, const Slot& slot, const std::vector<Arrived>& all) {
  for (int64_t head = 0; head < slot.output.size(1); ++head) {
    std::vector<packing::Source> sources;
    for (const Arrived& from : all) {
      const std::span<const int32_t> heads = segment.recv.heads_of(slot, from.peer);
      for (size_t i = 0; i < heads.size(); ++i) {
        if (heads[i] == head) sources.push_back(source_of(from.rows, static_cast<int64_t>(i) * slot.head_bytes));
      }
    }
    add_sum(work, slot, head * slot.head_bytes, slot.head_bytes, {}, sources);
  }
}

}  // namespace

void copy_by_kernel(ExchangeCall& call, const RowCopies& copies, bool sums) {
  WorkList work;
  for (const RowCopy& copy : copies) work.copy(copy);
  for (const Segment& segment : call.segments()) {
    for (const Slot& slot : segment.slots) {
      if (!sums || !segment.sums(slot)) continue;
      (segment.recv.heads_shared() ? add_heads : add_rows)(work, segment, slot, arrived_for(call, segment, slot));
    }
  }
  work.launch(call.wire());
}

bool kernel_adds(const ExchangeCall& call) {
  for (const Segment& segment : call.segments()) {
    for (const Slot& slot : segment.slots) {
      if (segment.sums(slot) && !item_of(slot.input.scalar_type())) return false;
    }
  }
  return true;
}

}  // namespace knapformer
