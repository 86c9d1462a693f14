// The CPU engine: copies of rows, listed from the tables.

#include <algorithm>
#include <unordered_map>
#include <vector>

#include "knapformer/core/util/error.h"
#include "knapformer/torch/exchange/duplicates.h"
#include "knapformer/torch/exchange/engine.h"
#include "knapformer/torch/exchange/recycled_memory.h"
#include "knapformer/torch/exchange/row_copy.h"

namespace knapformer {
namespace {

/// Where the rows and columns of a tensor that meet one peer lie.
struct Place {
  std::byte* base = nullptr;
  int64_t stride = 0;  // bytes between rows
  std::vector<ColumnRun> columns;
  std::vector<RowRun> rows;
};

/// A slot's columns of the rows for one peer on a wire.
struct WireBlock {
  Segment& segment;
  Slot& slot;
  int32_t peer = 0;
  int64_t first_byte = 0;  // of the wire
  int64_t num_rows = 0;
  int64_t row_bytes = 0;  // of all slots
  int64_t width = 0;      // of this slot
};

class CpuEngine final : public Engine {
 public:
  explicit CpuEngine(ExchangeCall& call) : call_(call) {}

  WireBuffers pack() override {
    wire_ = {.send = empty_recycled({call_.total_sent_bytes()}, at::kByte),
             .recv = empty_recycled({call_.total_received_bytes()}, at::kByte)};
    CopyList copies;
    for_each_block(/*sending=*/true, [&](const WireBlock& block) {
      add_wire_copies(copies, source(block.segment, block.slot, block.peer), block, /*sending=*/true);
    });
    copies.run();
    return wire_;
  }

  void move_own() override {
    call_.allocate_outputs();
    const int32_t self = call_.this_peer();
    CopyList copies;
    for (Segment& segment : call_.segments()) {
      for (Slot& slot : segment.slots) {
        const Place from = source(segment, slot, self);
        if (segment.sums(slot)) {
          at::Tensor& own = own_to_sum_[&slot];
          const int64_t width = segment.recv.wire_bytes(slot, self, slot.output_row_bytes);
          own = at::empty({segment.recv.peer_rows(self), width}, at::kByte);
          if (own.numel() > 0) add_own_copies(copies, from, dense_rows(own));
        } else {
          add_own_copies(copies, from, target(segment, slot, self));
        }
      }
    }
    copies.run();
  }

  void unpack() override {
    std::unordered_map<const Slot*, at::Tensor> sums;
    for (const Segment& segment : call_.segments()) {
      for (const Slot& slot : segment.slots) {
        if (!segment.sums(slot)) continue;
        sums[&slot] = zeros_to_sum(slot.output);
        add_block(sums[&slot], segment, slot, call_.this_peer(), own_to_sum_[&slot]);
      }
    }
    CopyList copies;
    for_each_block(/*sending=*/false, [&](const WireBlock& block) {
      if (!block.segment.sums(block.slot)) {
        add_wire_copies(copies, target(block.segment, block.slot, block.peer), block, /*sending=*/false);
        return;
      }
      const at::Tensor columns =
          wire_.recv.as_strided({block.num_rows, block.width}, {block.row_bytes, 1}, block.first_byte);
      add_block(sums[&block.slot], block.segment, block.slot, block.peer, columns);
    });
    copies.run();
    for (const auto& [slot, sum] : sums) slot->output.copy_(sum);
    wire_ = {};
  }

 private:
  /// Visits the blocks of a wire in its order.
  template <class Visit>
  void for_each_block(bool sending, Visit visit) {
    int64_t first_byte = 0;
    for (int32_t peer = 0; peer < call_.num_peers(); ++peer) {
      if (peer == call_.this_peer()) continue;
      for (Segment& segment : call_.segments()) {
        const SegmentEnd& end = sending ? segment.send : segment.recv;
        const int64_t row_bytes = sending ? segment.sent_row_bytes(peer) : segment.received_row_bytes(peer);
        int64_t column = 0;
        for (Slot& slot : segment.slots) {
          const int64_t width = end.wire_bytes(slot, peer, sending ? slot.input_row_bytes : slot.output_row_bytes);
          visit(WireBlock{.segment = segment,
                          .slot = slot,
                          .peer = peer,
                          .first_byte = first_byte + column,
                          .num_rows = end.peer_rows(peer),
                          .row_bytes = row_bytes,
                          .width = width});
          column += width;
        }
        first_byte += end.peer_rows(peer) * row_bytes;
      }
    }
    KNAPFORMER_ASSERT(first_byte == (sending ? call_.total_sent_bytes() : call_.total_received_bytes()));
  }

  static Place place_of(const Slot& slot, const SegmentEnd& end, int32_t peer, void* base, int64_t stride,
                        int64_t row_bytes) {
    const std::span<const RowRun> runs = end.runs_of(peer);
    Place place{
        .base = static_cast<std::byte*>(base), .stride = stride, .columns = {}, .rows = {runs.begin(), runs.end()}};
    end.for_each_column_run(slot, peer, row_bytes, [&](ColumnRun run) { place.columns.push_back(run); });
    return place;
  }

  static Place source(const Segment& segment, const Slot& slot, int32_t peer) {
    // Inputs are only read; a Place serves both directions.
    void* base = const_cast<void*>(slot.input.const_data_ptr());
    return place_of(slot, segment.send, peer, base, slot.input_stride_bytes, slot.input_row_bytes);
  }

  static Place target(const Segment& segment, const Slot& slot, int32_t peer) {
    return place_of(slot, segment.recv, peer, slot.output.mutable_data_ptr(), slot.output_row_bytes,
                    slot.output_row_bytes);
  }

  static Place dense_rows(const at::Tensor& bytes) {
    return {.base = static_cast<std::byte*>(bytes.mutable_data_ptr()),
            .stride = bytes.size(1),
            .columns = {{.first_byte = 0, .num_bytes = bytes.size(1)}},
            .rows = {{.first_row = 0, .num_rows = bytes.size(0)}}};
  }

  void add_wire_copies(CopyList& copies, const Place& place, const WireBlock& block, bool sending) const {
    const at::Tensor& wire = sending ? wire_.send : wire_.recv;
    std::byte* column_on_wire = static_cast<std::byte*>(wire.mutable_data_ptr()) + block.first_byte;
    for (const ColumnRun& column : place.columns) {
      std::byte* on_wire = column_on_wire;
      for (const RowRun& run : place.rows) {
        std::byte* in_tensor = place.base + run.first_row * place.stride + column.first_byte;
        copies.add({.from = sending ? in_tensor : on_wire,
                    .to = sending ? on_wire : in_tensor,
                    .from_stride = sending ? place.stride : block.row_bytes,
                    .to_stride = sending ? block.row_bytes : place.stride,
                    .width = column.num_bytes,
                    .num_rows = run.num_rows});
        on_wire += run.num_rows * block.row_bytes;
      }
      column_on_wire += column.num_bytes;
    }
  }

  /// Both ends list the same rows in the same order, cut into runs differently; columns likewise.
  static void add_own_copies(CopyList& copies, const Place& from, const Place& to) {
    size_t f = 0, t = 0;
    int64_t f_done = 0, t_done = 0;
    while (f < from.columns.size() && t < to.columns.size()) {
      const int64_t width = std::min(from.columns[f].num_bytes - f_done, to.columns[t].num_bytes - t_done);
      add_own_columns(copies, from, to, from.columns[f].first_byte + f_done, to.columns[t].first_byte + t_done, width);
      if ((f_done += width) == from.columns[f].num_bytes) ++f, f_done = 0;
      if ((t_done += width) == to.columns[t].num_bytes) ++t, t_done = 0;
    }
    KNAPFORMER_ASSERT(f == from.columns.size() && t == to.columns.size());
  }

  static void add_own_columns(CopyList& copies, const Place& from, const Place& to, int64_t from_byte, int64_t to_byte,
                              int64_t width) {
    size_t f = 0, t = 0;
    int64_t f_done = 0, t_done = 0;
    while (f < from.rows.size() && t < to.rows.size()) {
      const int64_t rows = std::min(from.rows[f].num_rows - f_done, to.rows[t].num_rows - t_done);
      copies.add({.from = from.base + (from.rows[f].first_row + f_done) * from.stride + from_byte,
                  .to = to.base + (to.rows[t].first_row + t_done) * to.stride + to_byte,
                  .from_stride = from.stride,
                  .to_stride = to.stride,
                  .width = width,
                  .num_rows = rows});
      if ((f_done += rows) == from.rows[f].num_rows) ++f, f_done = 0;
      if ((t_done += rows) == to.rows[t].num_rows) ++t, t_done = 0;
    }
  }

  ExchangeCall& call_;
  WireBuffers wire_;
  std::unordered_map<const Slot*, at::Tensor> own_to_sum_;  // this rank's own rows, of slots that sum
};

}  // namespace

std::unique_ptr<Engine> make_cpu_engine(ExchangeCall& call) { return std::make_unique<CpuEngine>(call); }

}  // namespace knapformer
