// The CPU engine: copies of rows, listed from the tables.

#include <algorithm>
#include <vector>

#include "knapformer/core/util/error.h"
#include "knapformer/torch/exchange/duplicates.h"
#include "knapformer/torch/exchange/engine.h"
#include "knapformer/torch/exchange/row_copy.h"

namespace knapformer {
namespace {

/// Where the rows and columns of a tensor that meet one peer lie.
struct Place {
  std::byte* base = nullptr;
  int64_t stride = 0;  // bytes between rows
  std::vector<ColumnRun> columns;
  std::span<const RowRun> rows;
};

/// Of two lists of runs that are equally long in all, the runs that both have where they are cut wherever either is:
/// visit(begin of the run in one, begin in the other, length).
template <class Run, class Visit>
void for_each_common_run(std::span<const Run> from, std::span<const Run> to, int64_t Run::*begin, int64_t Run::*length,
                         Visit visit) {
  size_t f = 0, t = 0;
  int64_t f_done = 0, t_done = 0;
  while (f < from.size() && t < to.size()) {
    const int64_t common = std::min(from[f].*length - f_done, to[t].*length - t_done);
    visit(from[f].*begin + f_done, to[t].*begin + t_done, common);
    if ((f_done += common) == from[f].*length) ++f, f_done = 0;
    if ((t_done += common) == to[t].*length) ++t, t_done = 0;
  }
  KNAPFORMER_ASSERT(f == from.size() && t == to.size());
}

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
        add_own_copies(copies, place_of(slot, s.send, block.peer), place_of(slot, s.recv, block.peer));
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
    std::byte* column_on_wire = static_cast<std::byte*>(call_.wire().mutable_data_ptr()) + first_byte;
    for (const ColumnRun& column : place.columns) {
      std::byte* on_wire = column_on_wire;
      for (const RowRun& run : place.rows) {
        std::byte* in_tensor = place.base + run.first_row * place.stride + column.first_byte;
        copies.add({.from = sends ? in_tensor : on_wire,
                    .to = sends ? on_wire : in_tensor,
                    .from_stride = sends ? place.stride : block.row_bytes,
                    .to_stride = sends ? block.row_bytes : place.stride,
                    .width = column.num_bytes,
                    .num_rows = run.num_rows});
        on_wire += run.num_rows * block.row_bytes;
      }
      column_on_wire += column.num_bytes;
    }
  }

  /// Both ends list the same rows in the same order, cut into runs differently; columns likewise.
  static void add_own_copies(CopyList& copies, const Place& from, const Place& to) {
    const auto add_columns = [&](int64_t from_byte, int64_t to_byte, int64_t width) {
      const auto add_rows = [&](int64_t from_row, int64_t to_row, int64_t num_rows) {
        copies.add({.from = from.base + from_row * from.stride + from_byte,
                    .to = to.base + to_row * to.stride + to_byte,
                    .from_stride = from.stride,
                    .to_stride = to.stride,
                    .width = width,
                    .num_rows = num_rows});
      };
      for_each_common_run(from.rows, to.rows, &RowRun::first_row, &RowRun::num_rows, add_rows);
    };
    for_each_common_run<ColumnRun>(from.columns, to.columns, &ColumnRun::first_byte, &ColumnRun::num_bytes,
                                   add_columns);
  }

  ExchangeCall& call_;
};

}  // namespace

std::unique_ptr<Engine> make_cpu_engine(ExchangeCall& call) { return std::make_unique<CpuEngine>(call); }

}  // namespace knapformer
