#include "knapformer/torch/exchange/exchange_buffer.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "knapformer/core/util/error.h"

namespace knapformer {
namespace {

/// The tensor, or a copy of it, in which each row is one run of bytes. Gaps between rows do not matter: a view into a
/// fused q, k, v projection travels without a copy.
at::Tensor with_dense_rows(const at::Tensor& tensor) {
  at::Tensor plain = tensor.is_conj() || tensor.is_neg() ? tensor.resolve_conj().resolve_neg() : tensor;
  int64_t expected = 1;
  for (int64_t dim = plain.dim() - 1; dim > 0; --dim) {
    if (plain.size(dim) != 1 && plain.stride(dim) != expected) return plain.contiguous();
    expected *= plain.size(dim);
  }
  return plain;
}

int64_t row_bytes_of(at::IntArrayRef shape, int64_t item_bytes) {
  int64_t bytes = item_bytes;
  for (size_t dim = 1; dim < shape.size(); ++dim) bytes *= shape[dim];
  return bytes;
}

/// The rows of a slot's input (or output) that meet `peer` at a send end (or receive end).
Rows rows_of(const Slot& slot, const SegmentEnd& end, int32_t peer) {
  void* first = end.sends ? const_cast<void*>(slot.input.const_data_ptr()) : slot.output.mutable_data_ptr();
  return {.first = static_cast<std::byte*>(first),
          .stride = end.sends ? slot.input_stride_bytes : slot.output_row_bytes,
          .index = end.rows.all_rows ? nullptr : end.rows.index_at(peer)};
}

/// Adds the copies of this rank's own rows, from input to output. Both ends list the same rows in the same order, and
/// the same columns in the same order, cut differently.
void add_own_copies(Copies& copies, const WireBlock& block) {
  const auto& [send, recv, heads, slots] = *block.segment;
  const Slot& slot = *block.slot;
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

}  // namespace

std::span<const int32_t> SegmentEnd::heads_of(const Slot& slot, int32_t peer) const {
  const int32_t index = peer - this_peer + sharing.index_in_group;
  if (index < 0 || index >= sharing.degree) return {};
  return slot.shares->of(index % sharing.head_parts());
}

int64_t SegmentEnd::wire_bytes(const Slot& slot, int32_t peer) const {
  if (shares_of(slot) == nullptr) return row_bytes(slot);
  return static_cast<int64_t>(heads_of(slot, peer).size()) * slot.head_bytes;
}

ColumnRuns SegmentEnd::columns_of(const Slot& slot, int32_t peer) const {
  ColumnRuns runs;
  if (shares_of(slot) == nullptr) {
    if (row_bytes(slot) > 0) runs.push_back({.first_byte = 0, .num_bytes = row_bytes(slot)});
    return runs;
  }
  int32_t last = -2;
  for (const int32_t head : heads_of(slot, peer)) {
    if (slot.head_bytes == 0) break;
    if (head != std::exchange(last, head) + 1) runs.push_back({.first_byte = head * slot.head_bytes});
    runs.back().num_bytes += slot.head_bytes;
  }
  return runs;
}

ExchangeBuffer::ExchangeBuffer(at::TensorList tensors, const ExchangeArguments& arguments)
    : first_table_(arguments.segments.at(0).table), device_(tensors.at(0).device()), label_(arguments.label()) {
  segments_.reserve(arguments.segments.size());  // slots point into it
  size_t next = 0;
  for (const SegmentArguments& given : arguments.segments) {
    const auto& [table, roles, sharing] = given;
    const int32_t first_sharer = table.this_peer - sharing.index_in_group;
    KNAPFORMER_ASSERT(table.num_peers == first_table_.num_peers && sharing.index_in_group < sharing.degree &&
                      first_sharer >= 0 && first_sharer + sharing.degree <= first_table_.num_peers);
    Segment& segment = segments_.emplace_back(Segment{.send = {*table.send, /*sends=*/true, sharing, table.this_peer},
                                                      .recv = {*table.recv, /*sends=*/false, sharing, table.this_peer},
                                                      .heads = head_partition(arguments.heads, sharing.head_parts()),
                                                      .slots = {}});
    segment.slots.reserve(roles.size());
    for (const HeadRole role : roles) {
      add_slot(segment, tensors.at(next), role, sharing, next);
      ++next;
    }
  }
  KNAPFORMER_ASSERT(next == tensors.size());
  KNAPFORMER_ASSERT(first_table_.engine != ExchangeEngine::kCpu || device_.is_cpu());
  allocate_wire();
}

void ExchangeBuffer::add_slot(Segment& segment, const at::Tensor& tensor, HeadRole role, const HeadSharing& sharing,
                              size_t number) {
  const HeadPartition& heads = *segment.heads;
  const HeadShares* shares = role == HeadRole::kNone    ? nullptr
                             : role == HeadRole::kQuery ? &heads.query
                                                        : &heads.key_value;
  const PackedEnd &send = segment.send.rows, &recv = segment.recv.rows;
  const auto heads_at = [&](const PackedEnd& end) {
    return end.heads_shared ? shares->num_heads : std::ssize(shares->of(sharing.index_in_group % sharing.head_parts()));
  };
  const auto name = [&] { return text(label_, ": tensor ", number); };  // for messages
  if (tensor.layout() != at::kStrided || tensor.dim() < (shares == nullptr ? 1 : 2)) {
    throw_argument(name(), text(tensor.dim(), " dimensions in layout ", tensor.layout()),
                   text("a strided tensor of rows", shares == nullptr ? "" : " and heads"));
  }
  if (tensor.size(0) != send.num_rows) {
    throw_argument(name(), text(tensor.size(0), " rows"), std::to_string(send.num_rows));
  }
  KNAPFORMER_ASSERT(shares != nullptr ? tensor.size(1) == heads_at(send) : !send.heads_shared && !recv.heads_shared);
  if (tensor.device() != device_) throw_argument(name(), tensor.device(), text(device_, ", as the first one is on"));

  ++num_slots_;
  Slot& slot = segment.slots.emplace_back(
      Slot{.input = with_dense_rows(tensor), .output_shape = at::DimVector(tensor.sizes()), .shares = shares});
  const auto item_bytes = static_cast<int64_t>(tensor.itemsize());
  slot.input_row_bytes = row_bytes_of(slot.output_shape, item_bytes);
  slot.output_shape[0] = recv.num_rows;
  if (shares != nullptr) {
    slot.head_bytes = row_bytes_of(at::IntArrayRef(slot.output_shape).slice(1), item_bytes);
    slot.output_shape[1] = heads_at(recv);
  }
  slot.output_row_bytes = row_bytes_of(slot.output_shape, item_bytes);
  slot.input_stride_bytes = slot.input.size(0) > 1 ? slot.input.stride(0) * item_bytes : slot.input_row_bytes;
}

int64_t ExchangeBuffer::add_peer(std::vector<WireBlock>& blocks, SegmentEnd Segment::*end, int32_t peer,
                                 int64_t first_byte) {
  for (Segment& segment : segments_) {
    for (Slot& slot : segment.slots) {
      const WireBlock& block = blocks.emplace_back(WireBlock{.segment = &segment,
                                                             .slot = &slot,
                                                             .end = &(segment.*end),
                                                             .peer = peer,
                                                             .first_byte = first_byte,
                                                             .num_rows = (segment.*end).rows.peer_rows(peer),
                                                             .row_bytes = (segment.*end).wire_bytes(slot, peer)});
      const int64_t num_bytes = block.num_rows * block.row_bytes;
      first_byte += (num_bytes + kMaxWordBytes - 1) / kMaxWordBytes * kMaxWordBytes;
    }
  }
  return first_byte;
}

void ExchangeBuffer::allocate_wire() {
  int64_t next_byte = 0;
  for (auto* blocks : {&sent_blocks_, &received_blocks_}) {
    blocks->reserve(static_cast<size_t>(num_slots_) * static_cast<size_t>(first_table_.num_peers));
  }
  const auto add_others = [&](std::vector<WireBlock>& blocks, SegmentEnd Segment::*end) {
    std::vector<int64_t> bytes(static_cast<size_t>(first_table_.num_peers), 0);
    for (int32_t peer = 0; peer < first_table_.num_peers; ++peer) {
      if (peer == first_table_.this_peer) continue;
      const int64_t first_byte = std::exchange(next_byte, add_peer(blocks, end, peer, next_byte));
      bytes[static_cast<size_t>(peer)] = next_byte - first_byte;
    }
    return bytes;
  };
  sent_bytes_ = add_others(sent_blocks_, &Segment::send);
  own_begin_ = next_byte;
  own_end_ = add_peer(sent_blocks_, &Segment::send, first_table_.this_peer, own_begin_);
  next_byte = add_peer(received_blocks_, &Segment::recv, first_table_.this_peer, own_begin_);
  KNAPFORMER_ASSERT(next_byte == own_end_);
  received_bytes_ = add_others(received_blocks_, &Segment::recv);
  wire_ = at::empty({next_byte}, at::TensorOptions().dtype(at::kByte).device(device_));
}

void ExchangeBuffer::add_wire_copies(Copies& copies, const WireBlock& block) const {
  const Rows rows = rows_of(*block.slot, *block.end, block.peer);
  const Rows wire{.first = static_cast<std::byte*>(wire_.mutable_data_ptr()) + block.first_byte,
                  .stride = block.row_bytes};
  int64_t next = 0;
  for (const ColumnRun& run : block.end->columns_of(*block.slot, block.peer)) {
    if (block.end->sends) {
      copies.add(rows, run.first_byte, wire, next, run.num_bytes, block.num_rows);
    } else {
      copies.add(wire, next, rows, run.first_byte, run.num_bytes, block.num_rows);
    }
    next += run.num_bytes;
  }
}

void ExchangeBuffer::add_own(Copies& copies) {
  for (Segment& segment : segments_) {
    for (Slot& slot : segment.slots) slot.output = at::empty(slot.output_shape, slot.input.options());
  }
  for (const WireBlock& block : sent_blocks_) {
    if (block.peer != first_table_.this_peer) continue;
    block.sums() ? add_wire_copies(copies, block) : add_own_copies(copies, block);
  }
}

/// What arrived in a block. The sum begins as zeros. It is taken in float32 for half types, in one fixed order (this
/// rank's own, then by peer), so that a run gives the same bits each time.
void ExchangeBuffer::add_to_sum(const WireBlock& block) const {
  const SegmentEnd& recv = *block.end;
  Slot& slot = *block.slot;
  if (!slot.sum.defined()) {
    slot.sum = at::zeros(slot.output.sizes(), slot.output.options().dtype(at::toOpMathType(slot.output.scalar_type())));
  }
  if (block.row_bytes == 0 || block.num_rows == 0) return;
  std::vector<int64_t> shape = slot.output.sizes().vec();
  shape[0] = block.num_rows;
  if (recv.rows.heads_shared) shape[1] = -1;
  const at::Tensor values = wire_.narrow(0, block.first_byte, block.num_rows * block.row_bytes)
                                .view(slot.output.scalar_type())
                                .view(shape)
                                .to(slot.sum.scalar_type());
  const auto add = [&](at::Tensor sum, const at::Tensor& rows) {
    if (recv.rows.all_rows) {
      sum.add_(rows);
    } else {
      sum.index_add_(0, recv.rows.index_of(block.peer), rows);  // no row is twice in the index
    }
  };
  if (!recv.rows.heads_shared) return add(slot.sum, values);
  int64_t next = 0;
  for (const ColumnRun& run : recv.columns_of(slot, block.peer)) {
    const int64_t first_head = run.first_byte / slot.head_bytes, num_heads = run.num_bytes / slot.head_bytes;
    add(slot.sum.narrow(1, first_head, num_heads), values.narrow(1, next, num_heads));
    next += num_heads;
  }
}

void ExchangeBuffer::pack() {
  Copies copies;
  for (const WireBlock& block : sent_blocks_) {
    if (block.peer != first_table_.this_peer) add_wire_copies(copies, block);
  }
  if (first_table_.engine == ExchangeEngine::kKernel) add_own(copies);
  copies.run(first_table_.engine, wire_);
}

void ExchangeBuffer::move_own() {
  if (first_table_.engine == ExchangeEngine::kKernel) return;
  Copies copies;
  add_own(copies);
  copies.run(first_table_.engine, wire_);
}

std::vector<at::Tensor> ExchangeBuffer::unpack() {
  Copies copies;
  for (const WireBlock& block : received_blocks_) {
    if (block.sums()) {
      add_to_sum(block);
    } else if (block.peer != first_table_.this_peer) {
      add_wire_copies(copies, block);
    }
  }
  copies.run(first_table_.engine, wire_);
  std::vector<at::Tensor> outputs;
  for (const Segment& segment : segments_) {
    for (const Slot& slot : segment.slots) {
      if (slot.sum.defined()) slot.output.copy_(slot.sum);
      outputs.push_back(slot.output);
    }
  }
  return outputs;
}

}  // namespace knapformer
