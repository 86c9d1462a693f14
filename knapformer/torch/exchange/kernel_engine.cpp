// The engine that packs by one launch of the packing kernel, and unpacks by another (packing_kernel.h). From the tables
// it makes lists of copies and sums for the kernel. Every byte is read once and written once on each side, and own rows
// go straight from input to output.
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

/// Rows in memory: row i lies at base + index[i] * stride.
struct Rows {
  Address base = 0;
  Address index = 0;  // 0: in order
  int64_t stride = 0;

  Rows columns_from(int64_t byte) const {
    Rows columns = *this;
    columns.base += static_cast<Address>(byte);
    return columns;
  }
};

/// The work of one launch.
class WorkList {
 public:
  void copy(const Rows& from, const Rows& to, int64_t num_bytes, int64_t num_rows) {
    if (num_bytes == 0 || num_rows == 0) return;
    const auto places = static_cast<int64_t>(from.base | to.base);
    const int64_t word = std::gcd(packing_word(num_bytes, places), std::gcd(from.stride, to.stride));
    const int64_t num_words = num_bytes / word;
    copies_.push_back({.from = from.base,
                       .to = to.base,
                       .from_index = from.index,
                       .to_index = to.index,
                       .from_stride = from.stride,
                       .to_stride = to.stride,
                       .num_words = to_int(num_words),
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

class KernelEngine final : public Engine {
 public:
  explicit KernelEngine(ExchangeCall& call) : call_(call) {}

  void pack() override {
    call_.allocate_outputs();
    WorkList work;
    for_each_block(call_.sent_blocks(), [&](const WireBlock& block, Segment& segment, Address index) {
      segment.send.for_each_slot(segment.slots, block.peer, [&](const Slot& slot, int64_t byte) {
        if (block.peer == call_.this_peer()) {
          if (!segment.sums(slot)) copy_own(work, block, segment, slot, index);
          return;
        }
        Rows to = on_wire(block, call_.sent_at(block) + byte);
        segment.send.for_each_column_run(slot, block.peer, [&](ColumnRun run) {
          work.copy(of_input(slot, index).columns_from(run.first_byte), to, run.num_bytes, block.num_rows);
          to = to.columns_from(run.num_bytes);
        });
      });
    });
    work.launch(call_.wire());
  }

  void move_own() override {}  // packed with the others, or added by unpack

  void unpack() override {
    WorkList work;
    for (const auto& [from, to, row_bytes] : call_.local_rows()) {
      const int64_t num_rows = from.size(0);
      const int64_t stride = num_rows > 1 ? from.stride(0) * static_cast<int64_t>(from.itemsize()) : row_bytes;
      work.copy({.base = address_of(from.const_data_ptr()), .index = 0, .stride = stride},
                {.base = address_of(to.mutable_data_ptr()), .index = 0, .stride = row_bytes}, row_bytes, num_rows);
    }
    for_each_block(call_.received_blocks(), [&](const WireBlock& block, Segment& segment, Address index) {
      if (block.peer == call_.this_peer()) return;
      segment.recv.for_each_slot(segment.slots, block.peer, [&](const Slot& slot, int64_t byte) {
        if (segment.sums(slot)) return;
        Rows from = on_wire(block, call_.received_at(block) + byte);
        segment.recv.for_each_column_run(slot, block.peer, [&](ColumnRun run) {
          work.copy(from, of_output(slot, index).columns_from(run.first_byte), run.num_bytes, block.num_rows);
          from = from.columns_from(run.num_bytes);
        });
      });
    });
    for (size_t s = 0; s < call_.segments().size(); ++s) {
      const Segment& segment = call_.segments()[s];
      for (size_t i = 0; i < segment.slots.size(); ++i) {
        if (!segment.sums(segment.slots[i])) continue;
        segment.recv.heads_shared() ? add_heads(work, s, i) : add_rows(work, s, i);
      }
    }
    work.launch(call_.wire());
  }

 private:
  /// visit(block, its segment, index) for each block that has rows, in the buffer's order. The index lists the tensor's
  /// rows that are in the block; 0: all of them, in order.
  template <class Visit>
  void for_each_block(const std::vector<WireBlock>& blocks, Visit visit) {
    std::vector<int64_t> next_row(call_.segments().size(), 0);  // the next of the others' rows in the gather index
    for (const WireBlock& block : blocks) {
      if (block.num_rows == 0) continue;
      visit(block, call_.segments()[block.segment], index_of(block, next_row[block.segment]));
      if (block.peer != call_.this_peer()) next_row[block.segment] += block.num_rows;
    }
  }

  /// The gather index lists the rows that meet others, by peer, then the own rows.
  Address index_of(const WireBlock& block, int64_t row_of_others) const {
    if (block.end->heads_shared()) return 0;
    const bool own = block.peer == call_.this_peer();
    const int64_t first = own ? block.end->num_wire_rows() - block.num_rows : row_of_others;
    return address_of(block.end->gather_index().const_data_ptr()) + static_cast<Address>(first) * sizeof(int64_t);
  }

  static Rows of_input(const Slot& slot, Address index) {
    return {.base = address_of(slot.input.const_data_ptr()), .index = index, .stride = slot.input_stride_bytes};
  }
  static Rows of_output(const Slot& slot, Address index) {
    return {.base = address_of(slot.output.mutable_data_ptr()), .index = index, .stride = slot.output_row_bytes};
  }
  static Rows on_wire(const WireBlock& block, const std::byte* columns) {
    return {.base = address_of(columns), .index = 0, .stride = block.row_bytes};
  }

  const WireBlock& own_block(const std::vector<WireBlock>& blocks, size_t segment) const {
    return *std::ranges::find_if(
        blocks, [&](const WireBlock& block) { return block.segment == segment && block.peer == call_.this_peer(); });
  }

  /// Copies own rows from the input to the output. Both ends list the same rows and columns in the same order; at most
  /// one end has the columns in several runs.
  void copy_own(WorkList& work, const WireBlock& block, const Segment& segment, const Slot& slot,
                Address from_index) const {
    const auto s = static_cast<size_t>(&segment - call_.segments().data());
    const Rows from = of_input(slot, from_index);
    const Rows to = of_output(slot, index_of(own_block(call_.received_blocks(), s), 0));
    const bool runs_of_input = segment.send.heads_shared();
    int64_t next = 0;
    (runs_of_input ? segment.send : segment.recv).for_each_column_run(slot, block.peer, [&](ColumnRun run) {
      work.copy(from.columns_from(runs_of_input ? run.first_byte : next),
                to.columns_from(runs_of_input ? next : run.first_byte), run.num_bytes, block.num_rows);
      next += run.num_bytes;
    });
  }

  /// What arrived for a slot, and where: the own rows, then those of others by peer.
  struct Arrived {
    int32_t peer = 0;
    Rows rows;
    int64_t num_rows = 0;
  };
  std::vector<Arrived> arrived(size_t s, size_t slot_index) {
    std::vector<Arrived> all;
    const Slot& slot = call_.segments()[s].slots[slot_index];
    for_each_block(call_.received_blocks(), [&](const WireBlock& block, Segment& segment, Address) {
      if (block.segment != s) return;
      if (block.peer == call_.this_peer()) {
        // Read straight from the input, where their columns may lie apart (add_rows).
        const Address index = index_of(own_block(call_.sent_blocks(), s), 0);
        all.push_back({.peer = block.peer, .rows = of_input(slot, index), .num_rows = block.num_rows});
        return;
      }
      size_t next = 0;
      segment.recv.for_each_slot(segment.slots, block.peer, [&](const Slot&, int64_t byte) {
        if (next++ != slot_index) return;
        const Rows rows = on_wire(block, call_.received_at(block) + byte);
        all.push_back({.peer = block.peer, .rows = rows, .num_rows = block.num_rows});
      });
    });
    return all;
  }

  /// Adds the sums of a slot of which a row of the output has several places on the wire.
  void add_rows(WorkList& work, size_t s, size_t slot_index) {
    const Segment& segment = call_.segments()[s];
    const Slot& slot = segment.slots[slot_index];
    const at::Tensor scatter = segment.recv.scatter_index();
    const packing::Item item = *item_of(slot.output.scalar_type());
    const std::vector<Arrived> all = arrived(s, slot_index);
    const auto add = [&](int64_t own_byte, int64_t byte, int64_t num_bytes) {
      std::vector<packing::Source> sources;
      int64_t first_place = 0;
      for (const Arrived& from : all) {
        const Rows rows = from.rows.columns_from(from.peer == call_.this_peer() ? own_byte : byte);
        sources.push_back(
            {.from = rows.base, .from_index = rows.index, .from_stride = rows.stride, .first_place = first_place});
        first_place += from.num_rows;
      }
      work.add({.to = of_output(slot, 0).columns_from(byte).base,
                .to_stride = slot.output_row_bytes,
                .places = address_of(scatter.const_data_ptr()),
                .end_place = segment.recv.num_wire_rows(),
                .max_places = to_int(scatter.size(1)),
                .item = item,
                .num_rows = to_int(slot.output.size(0))},
               sources, num_bytes);
    };
    if (!segment.send.heads_shared()) return add(0, 0, slot.output_row_bytes);
    int64_t byte = 0;
    segment.send.for_each_column_run(slot, call_.this_peer(), [&](ColumnRun run) {
      add(run.first_byte, byte, run.num_bytes);
      byte += run.num_bytes;
    });
  }

  /// Adds the sums of a slot of which a head came from several peers. Each of these sent all rows.
  void add_heads(WorkList& work, size_t s, size_t slot_index) {
    const Segment& segment = call_.segments()[s];
    const Slot& slot = segment.slots[slot_index];
    const packing::Item item = *item_of(slot.output.scalar_type());
    const std::vector<Arrived> all = arrived(s, slot_index);
    for (int64_t head = 0; head < slot.output.size(1); ++head) {
      std::vector<packing::Source> sources;
      for (const Arrived& from : all) {
        const std::span<const int32_t> heads = segment.recv.heads_of(slot, from.peer);
        for (size_t i = 0; i < heads.size(); ++i) {
          if (heads[i] != head) continue;
          const Rows rows = from.rows.columns_from(static_cast<int64_t>(i) * slot.head_bytes);
          sources.push_back({.from = rows.base, .from_index = rows.index, .from_stride = rows.stride});
        }
      }
      work.add({.to = of_output(slot, 0).columns_from(head * slot.head_bytes).base,
                .to_stride = slot.output_row_bytes,
                .item = item,
                .num_rows = to_int(slot.output.size(0))},
               sources, slot.head_bytes);
    }
  }

  ExchangeCall& call_;
};

}  // namespace

std::unique_ptr<Engine> make_kernel_engine(ExchangeCall& call) { return std::make_unique<KernelEngine>(call); }

bool packing_kernel_adds(const ExchangeCall& call) {
  for (const Segment& segment : call.segments()) {
    for (const Slot& slot : segment.slots) {
      if (segment.sums(slot) && !item_of(slot.input.scalar_type())) return false;
    }
  }
  return true;
}

}  // namespace knapformer
