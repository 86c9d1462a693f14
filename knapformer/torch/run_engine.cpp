// The CPU engine: copies of rows, listed from the tables.

#include <algorithm>
#include <vector>

#include "knapformer/core/error.h"
#include "knapformer/torch/engine.h"
#include "knapformer/torch/recycled_memory.h"
#include "knapformer/torch/repeats.h"
#include "knapformer/torch/row_copy.h"

namespace knapformer {
namespace {

/// Where the rows and columns of a tensor that meet one peer lie.
struct Place {
  std::byte* base = nullptr;
  int64_t stride = 0;  // bytes between rows
  std::vector<ColumnRun> columns;
  std::vector<RowRun> rows;
};

class RunEngine final : public Engine {
 public:
  explicit RunEngine(ExchangeCall& call) : call_(call) {}

  WireBuffers pack() override {
    wire_ = {.send = empty_recycled({call_.total_sent_bytes()}, at::kByte),
             .recv = empty_recycled({call_.total_received_bytes()}, at::kByte)};
    CopyList copies;
    int64_t first_byte = 0;
    for_each_block([&](ExchangeRegion& region, int32_t peer) {
      const int64_t row_bytes = region.sent_row_bytes(peer);
      int64_t column = 0;
      for (ExchangePart& part : region.parts) {
        Place place = source(region, part, peer);
        add_wire_copies(copies, place, wire_.send, first_byte + column, row_bytes, Direction::kToWire);
        column += part.wire_bytes(region.send, peer, part.input_row_bytes);
      }
      first_byte += region.send.peer_rows(peer) * row_bytes;
    });
    KNAPFORMER_ASSERT(first_byte == call_.total_sent_bytes());
    copies.run();
    return wire_;
  }

  void move_own() override {
    call_.allocate_outputs();
    sums_ = std::vector<std::vector<RepeatedRows>>(call_.regions().size());
    CopyList copies;
    size_t r = 0;
    for (ExchangeRegion& region : call_.regions()) {
      for (ExchangePart& part : region.parts) {
        sums_[r].push_back(region.sums(part) ? RepeatedRows(region, part) : RepeatedRows());
        const Place from = source(region, part, call_.this_peer());
        const Place to = target(region, part, sums_[r].back(), call_.this_peer());
        add_own_copies(copies, from, to);
      }
      ++r;
    }
    copies.run();
  }

  void unpack() override {
    CopyList copies;
    int64_t first_byte = 0;
    for_each_block([&](ExchangeRegion& region, int32_t peer) {
      const auto r = static_cast<size_t>(&region - call_.regions().data());
      const int64_t row_bytes = region.received_row_bytes(peer);
      int64_t column = 0;
      for (size_t i = 0; i < region.parts.size(); ++i) {
        ExchangePart& part = region.parts[i];
        Place place = target(region, part, sums_[r][i], peer);
        add_wire_copies(copies, place, wire_.recv, first_byte + column, row_bytes, Direction::kFromWire);
        column += part.wire_bytes(region.recv, peer, part.output_row_bytes);
      }
      first_byte += region.recv.peer_rows(peer) * row_bytes;
    });
    KNAPFORMER_ASSERT(first_byte == call_.total_received_bytes());
    copies.run();
    for (size_t r = 0; r < sums_.size(); ++r) {
      ExchangeRegion& region = call_.regions()[r];
      for (size_t i = 0; i < sums_[r].size(); ++i) {
        if (region.sums(region.parts[i])) sums_[r][i].sum_into(region, region.parts[i]);
      }
    }
    wire_ = {};
  }

 private:
  enum class Direction { kToWire, kFromWire };

  /// Blocks of the wire, in its order.
  template <class Visit>
  void for_each_block(Visit visit) {
    for (int32_t peer = 0; peer < call_.num_peers(); ++peer) {
      if (peer == call_.this_peer()) continue;
      for (ExchangeRegion& region : call_.regions()) visit(region, peer);
    }
  }

  static std::vector<ColumnRun> columns_of(const ExchangePart& part, const EndView& end, int32_t peer,
                                           int64_t row_bytes) {
    std::vector<ColumnRun> columns;
    part.for_each_column_run(end, peer, row_bytes, [&](ColumnRun run) { columns.push_back(run); });
    return columns;
  }

  static Place source(const ExchangeRegion& region, const ExchangePart& part, int32_t peer) {
    const std::span<const RowRun> runs = region.send.runs_of(peer);
    // Inputs are only read; the engine's Place serves both directions.
    return {.base = static_cast<std::byte*>(const_cast<void*>(part.input.const_data_ptr())),
            .stride = part.input_stride_bytes,
            .columns = columns_of(part, region.send, peer, part.input_row_bytes),
            .rows = {runs.begin(), runs.end()}};
  }

  /// In the output, or beside it where several values add up.
  static Place target(const ExchangeRegion& region, ExchangePart& part, RepeatedRows& sum, int32_t peer) {
    if (region.sums(part)) {
      const RepeatedRows::Block block = sum.block_of(peer);
      std::vector<ColumnRun> columns;
      if (block.row_bytes > 0) columns.push_back({.first_byte = 0, .num_bytes = block.row_bytes});
      return {.base = block.data,
              .stride = block.row_bytes,
              .columns = std::move(columns),
              .rows = {{.first_row = 0, .num_rows = block.num_rows}}};
    }
    const std::span<const RowRun> runs = region.recv.runs_of(peer);
    return {.base = static_cast<std::byte*>(part.output.mutable_data_ptr()),
            .stride = part.output_row_bytes,
            .columns = columns_of(part, region.recv, peer, part.output_row_bytes),
            .rows = {runs.begin(), runs.end()}};
  }

  static void add_wire_copies(CopyList& copies, const Place& place, const at::Tensor& wire, int64_t first_byte,
                              int64_t row_bytes, Direction direction) {
    std::byte* block = static_cast<std::byte*>(wire.mutable_data_ptr()) + first_byte;
    for (const ColumnRun& column : place.columns) {
      std::byte* on_wire = block;
      for (const RowRun& run : place.rows) {
        std::byte* in_tensor = place.base + run.first_row * place.stride + column.first_byte;
        if (direction == Direction::kToWire) {
          copies.add({.from = in_tensor,
                      .to = on_wire,
                      .from_stride = place.stride,
                      .to_stride = row_bytes,
                      .width = column.num_bytes,
                      .num_rows = run.num_rows});
        } else {
          copies.add({.from = on_wire,
                      .to = in_tensor,
                      .from_stride = row_bytes,
                      .to_stride = place.stride,
                      .width = column.num_bytes,
                      .num_rows = run.num_rows});
        }
        on_wire += run.num_rows * row_bytes;
      }
      block += column.num_bytes;
    }
  }

  /// Both ends list the same rows in the same order, cut into runs differently; columns likewise.
  static void add_own_copies(CopyList& copies, const Place& from, const Place& to) {
    if (from.rows.empty()) return;  // a block that nothing adds up in has no columns either
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
  std::vector<std::vector<RepeatedRows>> sums_;  // by region and part
};

}  // namespace

std::unique_ptr<Engine> make_run_engine(ExchangeCall& call) { return std::make_unique<RunEngine>(call); }

}  // namespace knapformer
