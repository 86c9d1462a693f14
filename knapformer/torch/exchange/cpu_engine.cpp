// The CPU engine: copies of rows, listed from the tables.

#include <utility>

#include "knapformer/torch/exchange/duplicates.h"
#include "knapformer/torch/exchange/engine.h"
#include "knapformer/torch/exchange/row_copy.h"

namespace knapformer {
namespace {

/// Where the rows of a tensor that meet one peer lie, and which of their columns.
struct Place {
  std::byte* base = nullptr;
  int64_t stride = 0;  // bytes between rows
  c10::SmallVector<ColumnRun, 4> columns;
  std::span<const RowRun> rows;
};

class CpuEngine final : public Engine {
 public:
  explicit CpuEngine(ExchangeCall& call) : call_(call) {}

  void pack() override {
    CopyList copies;
    for_each_slot(call_.sent_blocks(), [&](const WireBlock& block, const Segment&, const Slot& slot, int64_t byte) {
      if (block.peer != call_.this_peer()) add_wire_copies(copies, slot, block, byte);
    });
    copies.run();
  }

  void move_own() override {
    call_.allocate_outputs();
    CopyList copies;
    for_each_slot(call_.sent_blocks(), [&](const WireBlock& block, const Segment& s, const Slot& slot, int64_t byte) {
      if (block.peer != call_.this_peer()) return;
      if (s.sums(slot)) {  // together with those of others, in unpack
        add_wire_copies(copies, slot, block, byte);
      } else {
        add_own_copies(copies, place_of(slot, s.send, block.peer), place_of(slot, s.recv, block.peer), block.num_rows);
      }
    });
    copies.run();
  }

  void unpack() override {
    for (const ExchangeCall::LocalRows& rows : call_.local_rows()) rows.to.copy_(rows.from);
    CopyList copies;
    for_each_slot(call_.received_blocks(), [&](const WireBlock& block, const Segment& s, Slot& slot, int64_t byte) {
      if (s.sums(slot)) {
        const int64_t width = s.recv.wire_bytes(slot, block.peer);
        add_block(s.recv, slot, block.peer,
                  call_.wire().as_strided({block.num_rows, width}, {block.row_bytes, 1}, byte));
      } else if (block.peer != call_.this_peer()) {
        add_wire_copies(copies, slot, block, byte);
      }
    });
    copies.run();
  }

 private:
  /// visit(block, segment, slot, where in the buffer the slot's columns of the block begin), in the buffer's order.
  template <class Visit>
  void for_each_slot(const std::vector<WireBlock>& blocks, Visit visit) {
    for (const WireBlock& block : blocks) {
      Segment& segment = call_.segments()[block.segment];
      block.end->for_each_slot(segment.slots, block.peer,
                               [&](Slot& slot, int64_t byte) { visit(block, segment, slot, block.first_byte + byte); });
    }
  }

  static Place place_of(const Slot& slot, const SegmentEnd& end, int32_t peer) {
    const bool sends = end.kind == HeadSharing::kSend;
    // Inputs are only read; a Place serves both directions.
    void* base = sends ? const_cast<void*>(slot.input.const_data_ptr()) : slot.output.mutable_data_ptr();
    Place place{.base = static_cast<std::byte*>(base),
                .stride = sends ? slot.input_stride_bytes : slot.output_row_bytes,
                .columns = {},
                .rows = end.runs_of(peer)};
    end.for_each_column_run(slot, peer, [&](ColumnRun run) { place.columns.push_back(run); });
    return place;
  }

  /// Between a slot's tensor and its columns of a block, which begin at `first_byte` of the buffer.
  void add_wire_copies(CopyList& copies, const Slot& slot, const WireBlock& block, int64_t first_byte) const {
    const bool sends = block.end->kind == HeadSharing::kSend;
    const Place place = place_of(slot, *block.end, block.peer);
    std::byte* on_wire = static_cast<std::byte*>(call_.wire().mutable_data_ptr()) + first_byte;
    for (const ColumnRun& column : place.columns) {
      std::byte* in_tensor = place.base + column.first_byte;
      RowCopy copy{.from = in_tensor,
                   .to = on_wire,
                   .from_stride = place.stride,
                   .to_stride = block.row_bytes,
                   .width = column.num_bytes,
                   .num_rows = block.num_rows,
                   .from_runs = place.rows};
      if (!sends) {
        copy.from = on_wire;
        copy.to = in_tensor;
        std::swap(copy.from_stride, copy.to_stride);
        std::swap(copy.from_runs, copy.to_runs);
      }
      copies.add(copy);
      on_wire += column.num_bytes;
    }
  }

  /// Both ends list the same rows in the same order, cut into runs differently; columns likewise.
  static void add_own_copies(CopyList& copies, const Place& from, const Place& to, int64_t num_rows) {
    const auto add_columns = [&](int64_t from_byte, int64_t to_byte, int64_t width) {
      copies.add({.from = from.base + from_byte,
                  .to = to.base + to_byte,
                  .from_stride = from.stride,
                  .to_stride = to.stride,
                  .width = width,
                  .num_rows = num_rows,
                  .from_runs = from.rows,
                  .to_runs = to.rows});
    };
    for_each_common_run<ColumnRun>(from.columns, to.columns, &ColumnRun::first_byte, &ColumnRun::num_bytes,
                                   add_columns);
  }

  ExchangeCall& call_;
};

}  // namespace

std::unique_ptr<Engine> make_cpu_engine(ExchangeCall& call) { return std::make_unique<CpuEngine>(call); }

}  // namespace knapformer
