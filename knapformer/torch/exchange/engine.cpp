#include "knapformer/torch/exchange/engine.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "knapformer/torch/exchange/copies.h"

namespace knapformer {
namespace {

/// The rows of a slot's input (or output) that meet `peer` at a send end (or receive end).
Rows rows_of(const Slot& slot, const SegmentEnd& end, int32_t peer) {
  const bool sends = end.kind == HeadSharing::kSend;
  void* first = sends ? const_cast<void*>(slot.input.const_data_ptr()) : slot.output.mutable_data_ptr();
  return {.first = static_cast<std::byte*>(first),
          .stride = sends ? slot.input_stride_bytes : slot.output_row_bytes,
          .index = end.has_index() ? end.index_at(peer) : nullptr};
}

/// Of the rows of a block, between their tensor and the buffer.
void add_wire_copies(Copies& copies, ExchangeCall& call, const WireBlock& block) {
  const Slot& slot = call.slot_of(block);
  const Rows rows = rows_of(slot, *block.end, block.peer);
  const Rows wire{.first = static_cast<std::byte*>(call.wire().mutable_data_ptr()) + block.first_byte,
                  .stride = block.row_bytes};
  int64_t next = 0;
  for (const ColumnRun& run : block.end->columns_of(slot, block.peer)) {
    if (block.end->kind == HeadSharing::kSend) {
      copies.add(rows, run.first_byte, wire, next, run.num_bytes, block.num_rows);
    } else {
      copies.add(wire, next, rows, run.first_byte, run.num_bytes, block.num_rows);
    }
    next += run.num_bytes;
  }
}

/// Of this rank's own rows, from input to output. Both ends list the same rows in the same order, and the same columns
/// in the same order, cut differently.
void add_own_copies(Copies& copies, ExchangeCall& call, const WireBlock& block) {
  const auto& [send, recv, heads, slots] = call.segments()[block.segment];
  const Slot& slot = slots[block.slot];
  const Rows from = rows_of(slot, send, block.peer), to = rows_of(slot, recv, block.peer);
  ColumnRuns sent = send.columns_of(slot, block.peer), received = recv.columns_of(slot, block.peer);
  for (auto s = sent.begin(), r = received.begin(); s != sent.end() && r != received.end();) {
    const int64_t width = std::min(s->num_bytes, r->num_bytes);
    copies.add(from, s->first_byte, to, r->first_byte, width, block.num_rows);
    for (auto* run : {&s, &r}) {
      (*run)->first_byte += width;
      if (((*run)->num_bytes -= width) == 0) ++*run;
    }
  }
}

void add_own(Copies& copies, ExchangeCall& call) {
  call.allocate_outputs();
  for (const WireBlock& block : call.sent_blocks()) {
    if (block.peer == call.this_peer()) (call.sums(block) ? add_wire_copies : add_own_copies)(copies, call, block);
  }
}

/// Adds what arrived in a block to its slot's sum, which begins as zeros. Sums are taken in float32 for half types, in
/// one fixed order (this rank's own, then by peer), so that a run gives the same bits each time.
void add_block(ExchangeCall& call, const WireBlock& block) {
  const SegmentEnd& recv = *block.end;
  Slot& slot = call.slot_of(block);
  if (!slot.sum.defined()) {
    slot.sum = at::zeros(slot.output.sizes(), slot.output.options().dtype(at::toOpMathType(slot.output.scalar_type())));
  }
  if (block.row_bytes == 0 || block.num_rows == 0) return;
  std::vector<int64_t> shape = slot.output.sizes().vec();
  shape[0] = block.num_rows;
  if (recv.heads_shared()) shape[1] = -1;
  const at::Tensor values = call.wire()
                                .narrow(0, block.first_byte, block.num_rows * block.row_bytes)
                                .view(slot.output.scalar_type())
                                .view(shape)
                                .to(slot.sum.scalar_type());
  const auto add = [&](at::Tensor sum, const at::Tensor& rows) {
    if (recv.has_index()) {
      sum.index_add_(0, recv.index_of(block.peer), rows);  // no row is twice in the index
    } else {
      sum.add_(rows);
    }
  };
  if (!recv.heads_shared()) return add(slot.sum, values);
  int64_t next = 0;
  for (const ColumnRun& run : recv.columns_of(slot, block.peer)) {
    const int64_t first_head = run.first_byte / slot.head_bytes, num_heads = run.num_bytes / slot.head_bytes;
    add(slot.sum.narrow(1, first_head, num_heads), values.narrow(1, next, num_heads));
    next += num_heads;
  }
}

}  // namespace

void pack(ExchangeCall& call) {
  Copies copies;
  for (const WireBlock& block : call.sent_blocks()) {
    if (block.peer != call.this_peer()) add_wire_copies(copies, call, block);
  }
  if (call.engine() == ExchangeEngine::kKernel) add_own(copies, call);
  copies.run(call.engine(), call.wire());
}

void move_own(ExchangeCall& call) {
  if (call.engine() == ExchangeEngine::kKernel) return;
  Copies copies;
  add_own(copies, call);
  copies.run(call.engine(), call.wire());
}

void unpack(ExchangeCall& call) {
  Copies copies;
  for (const WireBlock& block : call.received_blocks()) {
    if (call.sums(block)) {
      add_block(call, block);
    } else if (block.peer != call.this_peer()) {
      add_wire_copies(copies, call, block);
    }
  }
  copies.run(call.engine(), call.wire());
}

}  // namespace knapformer
