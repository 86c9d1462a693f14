#include "knapformer/torch/exchange/cpu_engine.h"

#include <ATen/Parallel.h>

#include <cstring>
#include <type_traits>
#include <utility>

#include "knapformer/torch/exchange/duplicates.h"
#include "knapformer/torch/exchange/engine.h"

namespace knapformer {
namespace {

/// copy_run(from, to, number of rows), for all rows of the copy. By value, here and below: bytes that are written might
/// be those of a RowCopy in memory, so that the compiler would load its strides again for every row.
template <class CopyRun>
void for_each_run(RowCopy copy, CopyRun copy_run) {
  const std::byte* from = copy.from;
  std::byte* to = copy.to;
  if (copy.from_runs.empty() && copy.to_runs.empty()) {
    copy_run(from, to, copy.num_rows);
  } else if (copy.from_runs.empty()) {
    for (const RowRun& run : copy.to_runs) {
      copy_run(from, to + run.first_row * copy.to_stride, run.num_rows);
      from += run.num_rows * copy.from_stride;
    }
  } else if (copy.to_runs.empty()) {
    for (const RowRun& run : copy.from_runs) {
      copy_run(from + run.first_row * copy.from_stride, to, run.num_rows);
      to += run.num_rows * copy.to_stride;
    }
  } else {
    for_each_common_run(copy.from_runs, copy.to_runs, &RowRun::first_row, &RowRun::num_rows,
                        [&](int64_t from_row, int64_t to_row, int64_t num_rows) {
                          copy_run(from + from_row * copy.from_stride, to + to_row * copy.to_stride, num_rows);
                        });
  }
}

/// Known widths let the compiler turn a row's copy into one load and one store: side features are often that narrow.
template <int64_t kWidth>
void copy_narrow_rows(RowCopy copy, const std::byte* from, std::byte* to, int64_t num_rows) {
  for (; num_rows > 0; --num_rows, from += copy.from_stride, to += copy.to_stride) std::memcpy(to, from, kWidth);
}

/// visit(copier): copier(from, to, number of rows) copies rows that are consecutive at both ends.
template <class Visit>
void with_copier(RowCopy copy, Visit visit) {
  const auto narrow = [&]<int64_t kWidth>(std::integral_constant<int64_t, kWidth>) {
    visit([copy](const std::byte* from, std::byte* to, int64_t num_rows) {
      copy_narrow_rows<kWidth>(copy, from, to, num_rows);
    });
  };
  if (copy.from_stride == copy.width && copy.to_stride == copy.width) {
    return visit([copy](const std::byte* from, std::byte* to, int64_t num_rows) {
      std::memcpy(to, from, static_cast<size_t>(num_rows * copy.width));
    });
  }
  switch (copy.width) {
    case 1:
      return narrow(std::integral_constant<int64_t, 1>());
    case 2:
      return narrow(std::integral_constant<int64_t, 2>());
    case 4:
      return narrow(std::integral_constant<int64_t, 4>());
    case 8:
      return narrow(std::integral_constant<int64_t, 8>());
    case 16:
      return narrow(std::integral_constant<int64_t, 16>());
    default:
      visit([copy](const std::byte* from, std::byte* to, int64_t num_rows) {
        for (; num_rows > 0; --num_rows, from += copy.from_stride, to += copy.to_stride) {
          std::memcpy(to, from, static_cast<size_t>(copy.width));
        }
      });
  }
}

void copy_rows(RowCopy copy) {
  with_copier(copy, [&](auto copy_run) { for_each_run(copy, copy_run); });
}

/// Copies the rows [begin, end) of the copy.
void copy_rows(RowCopy copy, int64_t begin, int64_t end) {
  with_copier(copy, [&](auto copy_run) {
    int64_t first = 0;  // of the run at hand, among the rows of the copy
    for_each_run(copy, [&](const std::byte* from, std::byte* to, int64_t num_rows) {
      const int64_t skipped = std::max<int64_t>(begin - first, 0);
      const int64_t wanted = std::min(end - first, num_rows) - skipped;
      first += num_rows;
      if (wanted > 0) copy_run(from + skipped * copy.from_stride, to + skipped * copy.to_stride, wanted);
    });
  });
}

/// Copies the rows whose first byte, counted through the whole list, lies in [begin, end).
void copy_bytes(std::span<const RowCopy> copies, int64_t begin, int64_t end) {
  int64_t first = 0;  // byte of the copy at hand
  for (const RowCopy& copy : copies) {
    if (first >= end) return;
    const int64_t last = first + copy.width * copy.num_rows;
    if (last > begin) {
      const auto row_at = [&](int64_t byte) {
        return std::clamp<int64_t>((byte - first + copy.width - 1) / copy.width, 0, copy.num_rows);
      };
      copy_rows(copy, row_at(begin), row_at(end));
    }
    first = last;
  }
}

}  // namespace

void CopyList::add(RowCopy copy) {
  if (copy.width == 0 || copy.num_rows == 0) return;
  if (copy.from_runs.size() == 1) copy.from += std::exchange(copy.from_runs, {})[0].first_row * copy.from_stride;
  if (copy.to_runs.size() == 1) copy.to += std::exchange(copy.to_runs, {})[0].first_row * copy.to_stride;
  copies_.push_back(copy);
  num_bytes_ += copy.width * copy.num_rows;
}

void CopyList::run() const {
  constexpr int64_t kBytesWorthAThread = 256 << 10;
  if (num_bytes_ <= kBytesWorthAThread || at::get_num_threads() == 1 || at::in_parallel_region()) {
    for (const RowCopy& copy : copies_) copy_rows(copy);
    return;
  }
  at::parallel_for(0, num_bytes_, kBytesWorthAThread,
                   [this](int64_t begin, int64_t end) { copy_bytes({copies_.data(), copies_.size()}, begin, end); });
}

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
      if (s.sums(slot)) {  // unpack adds them to those of others
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

  /// Adds the copies between a slot's tensor and its columns of a block, which begin at `first_byte` of the buffer.
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
