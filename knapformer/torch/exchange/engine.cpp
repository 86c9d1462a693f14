#include "knapformer/torch/exchange/engine.h"

namespace knapformer {
namespace {

c10::SmallVector<ColumnRun, 4> columns_of(const Slot& slot, const SegmentEnd& end, int32_t peer) {
  c10::SmallVector<ColumnRun, 4> columns;
  end.for_each_column_run(slot, peer, [&](ColumnRun run) { columns.push_back(run); });
  return columns;
}

void add(RowCopies& copies, Rows from, int64_t from_byte, Rows to, int64_t to_byte, int64_t width, int64_t num_rows) {
  if (width == 0 || num_rows == 0) return;
  from.first += from_byte;
  to.first += to_byte;
  copies.push_back({.from = from, .to = to, .width = width, .num_rows = num_rows});
}

}  // namespace

Rows rows_of(const Slot& slot, const SegmentEnd& end, int32_t peer) {
  const bool sends = end.kind == HeadSharing::kSend;
  const at::Tensor& tensor = sends ? slot.input : slot.output;
  void* first = sends ? const_cast<void*>(tensor.const_data_ptr()) : tensor.mutable_data_ptr();
  return {.first = static_cast<std::byte*>(first),
          .stride = sends ? slot.input_stride_bytes : slot.output_row_bytes,
          .tensor = &tensor,
          .end = end.heads_shared() ? nullptr : &end,  // at a shared end all rows meet every peer
          .peer = peer};
}

Rows rows_on_wire(const ExchangeCall& call, const WireBlock& block) {
  return {.first = static_cast<std::byte*>(call.wire().mutable_data_ptr()) + block.first_byte,
          .stride = block.row_bytes,
          .tensor = &call.wire()};
}

Engine::Engine(ExchangeCall& call) : call_(call), way_(call.engine()) {
  if (way_ == ExchangeEngine::kKernel && !kernel_adds(call)) way_ = ExchangeEngine::kDevice;
}

void Engine::add_wire_copies(RowCopies& copies, const WireBlock& block) const {
  const Slot& slot = call_.slot_of(block);
  const Rows rows = rows_of(slot, *block.end, block.peer), wire = rows_on_wire(call_, block);
  int64_t next = 0;
  block.end->for_each_column_run(slot, block.peer, [&](ColumnRun run) {
    if (block.end->kind == HeadSharing::kSend) {
      add(copies, rows, run.first_byte, wire, next, run.num_bytes, block.num_rows);
    } else {
      add(copies, wire, next, rows, run.first_byte, run.num_bytes, block.num_rows);
    }
    next += run.num_bytes;
  });
}

/// Both ends list the same rows in the same order, and the same columns in the same order, cut differently.
void Engine::add_own_copies(RowCopies& copies, const WireBlock& block) const {
  const Segment& segment = call_.segments()[block.segment];
  const Slot& slot = call_.slot_of(block);
  const Rows from = rows_of(slot, segment.send, block.peer), to = rows_of(slot, segment.recv, block.peer);
  for_each_common_run<ColumnRun>(columns_of(slot, segment.send, block.peer), columns_of(slot, segment.recv, block.peer),
                                 &ColumnRun::first_byte, &ColumnRun::num_bytes,
                                 [&](int64_t from_byte, int64_t to_byte, int64_t width) {
                                   add(copies, from, from_byte, to, to_byte, width, block.num_rows);
                                 });
}

void Engine::add_own(RowCopies& copies) {
  call_.allocate_outputs();
  for (const WireBlock& block : call_.sent_blocks()) {
    if (block.peer != call_.this_peer()) continue;
    if (!call_.sums(block)) {
      add_own_copies(copies, block);
    } else if (way_ != ExchangeEngine::kKernel) {  // which reads them from the input
      add_wire_copies(copies, block);
    }
  }
}

void Engine::pack() {
  RowCopies copies;
  for (const WireBlock& block : call_.sent_blocks()) {
    if (block.peer != call_.this_peer()) add_wire_copies(copies, block);
  }
  if (way_ == ExchangeEngine::kKernel) add_own(copies);  // in the same launch
  run(copies);
}

void Engine::move_own() {
  if (way_ == ExchangeEngine::kKernel) return;
  RowCopies copies;
  add_own(copies);
  run(copies);
}

void Engine::unpack() {
  RowCopies copies;
  const std::vector<ExchangeCall::LocalRows> local = call_.local_rows();
  for (const auto& [from, to, row_bytes] : local) {
    const int64_t num_rows = from.size(0);
    const int64_t stride = num_rows > 1 ? from.stride(0) * static_cast<int64_t>(from.itemsize()) : row_bytes;
    void* const first = const_cast<void*>(from.const_data_ptr());
    add(copies, {.first = static_cast<std::byte*>(first), .stride = stride, .tensor = &from}, 0,
        {.first = static_cast<std::byte*>(to.mutable_data_ptr()), .stride = row_bytes, .tensor = &to}, 0, row_bytes,
        num_rows);
  }
  for (const WireBlock& block : call_.received_blocks()) {
    if (call_.sums(block)) {
      if (way_ != ExchangeEngine::kKernel) add_block(call_, block);
    } else if (block.peer != call_.this_peer()) {
      add_wire_copies(copies, block);
    }
  }
  if (way_ == ExchangeEngine::kKernel) {
    copy_by_kernel(call_, copies, /*sums=*/true);
  } else {
    run(copies);
  }
}

void Engine::run(const RowCopies& copies) const {
  switch (way_) {
    case ExchangeEngine::kCpu:
      return copy_on_cpu(copies);
    case ExchangeEngine::kDevice:
      return copy_by_aten(copies);
    case ExchangeEngine::kKernel:
      return copy_by_kernel(call_, copies, /*sums=*/false);
  }
}

}  // namespace knapformer
