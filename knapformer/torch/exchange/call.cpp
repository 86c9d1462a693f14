#include "knapformer/torch/exchange/call.h"

#include <utility>

#include "knapformer/core/util/error.h"
#include "knapformer/torch/exchange/copies.h"
#include "knapformer/torch/exchange/recycled_memory.h"

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

/// Checks that the tables say what the arguments say of them.
void check_tables(const Segment& segment, const HeadSharing& sharing, const Segment& first, const std::string& label) {
  const int32_t num_peers = first.send.num_peers(), index = sharing.index_in_group;
  const int32_t first_sharer = segment.send.this_peer() - index;
  const bool one_group = segment.send.num_peers() == num_peers && segment.recv.num_peers() == num_peers;
  const bool same_sharing = segment.send.heads_shared() == (sharing.shared_end == HeadSharing::kSend) &&
                            segment.recv.heads_shared() == (sharing.shared_end == HeadSharing::kRecv);
  const bool sharers_fit =
      index >= 0 && index < sharing.degree && first_sharer >= 0 && first_sharer + sharing.degree <= num_peers;
  if (!one_group || !same_sharing || !sharers_fit) {
    throw ArgumentError(text(label, ": got tables of several groups, or that share heads in another way than told"));
  }
}

}  // namespace

std::span<const int32_t> SegmentEnd::heads_of(const Slot& slot, int32_t peer) const {
  const int32_t index = peer - this_peer() + sharing.index_in_group;
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

ExchangeCall::ExchangeCall(const ExchangeArguments& arguments) : label_(arguments.label()) {
  const std::string& label = label_;
  if (arguments.tensors.empty()) throw ArgumentError(text(label, ": got no tensors, expected at least one"));
  device_ = arguments.tensors[0].device();
  segments_.reserve(arguments.segments.size());  // slots point into it
  size_t next = 0;
  for (const SegmentArguments& given : arguments.segments) {
    Segment& segment =
        segments_.emplace_back(Segment{.send = {PackedEndView(given.table.send), HeadSharing::kSend, given.sharing},
                                       .recv = {PackedEndView(given.table.recv), HeadSharing::kRecv, given.sharing},
                                       .heads = head_partition(arguments.heads, given.sharing.head_parts()),
                                       .slots = {}});
    check_tables(segment, given.sharing, segments_.front(), label);
    segment.slots.reserve(given.roles.size());
    for (const HeadRole role : given.roles) {
      add_slot(segment, arguments.tensors[next], role, given.sharing, next);
      ++next;
    }
  }
  if (engine() == ExchangeEngine::kCpu && !device_.is_cpu()) {
    throw ArgumentError(
        text(label, ": got tensors on ", device_, ", expected CPU tensors, as the tables were made for"));
  }
  allocate_wire();
}

void ExchangeCall::add_slot(Segment& segment, const at::Tensor& tensor, HeadRole role, const HeadSharing& sharing,
                            size_t number) {
  const HeadShares* shares = shares_of(*segment.heads, role);
  const auto name = [&] { return text(label_, ": tensor ", number); };  // for messages
  if (tensor.layout() != at::kStrided || tensor.dim() < (shares == nullptr ? 1 : 2)) {
    throw_argument(name(), text(tensor.dim(), " dimensions in layout ", tensor.layout()),
                   text("a strided tensor of rows", shares == nullptr ? "" : " and heads"));
  }
  if (tensor.size(0) != segment.send.num_rows()) {
    throw_argument(name(), text(tensor.size(0), " rows"), std::to_string(segment.send.num_rows()));
  }
  if (shares != nullptr && tensor.size(1) != num_heads_at(HeadSharing::kSend, *shares, sharing)) {
    throw_argument(name(), text(tensor.size(1), " heads"),
                   std::to_string(num_heads_at(HeadSharing::kSend, *shares, sharing)));
  }
  if (sharing.shared_end != HeadSharing::kNeither && shares == nullptr) {
    throw_argument(name(), "no role", "one where heads are shared");
  }
  if (tensor.device() != device_) throw_argument(name(), tensor.device(), text(device_, ", as the first one is on"));

  ++num_slots_;
  Slot& slot = segment.slots.emplace_back(
      Slot{.input = with_dense_rows(tensor), .output_shape = at::DimVector(tensor.sizes()), .shares = shares});
  const auto item_bytes = static_cast<int64_t>(tensor.itemsize());
  slot.input_row_bytes = row_bytes_of(slot.output_shape, item_bytes);
  slot.output_shape[0] = segment.recv.num_rows();
  if (shares != nullptr) {
    slot.head_bytes = row_bytes_of(at::IntArrayRef(slot.output_shape).slice(1), item_bytes);
    slot.output_shape[1] = num_heads_at(HeadSharing::kRecv, *shares, sharing);
  }
  slot.output_row_bytes = row_bytes_of(slot.output_shape, item_bytes);
  slot.input_stride_bytes = slot.input.size(0) > 1 ? slot.input.stride(0) * item_bytes : slot.input_row_bytes;
}

int64_t ExchangeCall::add_peer(std::vector<WireBlock>& blocks, SegmentEnd Segment::*end, int32_t peer,
                               int64_t first_byte) {
  for (size_t s = 0; s < segments_.size(); ++s) {
    const SegmentEnd& of_segment = segments_[s].*end;
    for (size_t i = 0; i < segments_[s].slots.size(); ++i) {
      const WireBlock& block =
          blocks.emplace_back(WireBlock{.segment = s,
                                        .slot = i,
                                        .end = &of_segment,
                                        .peer = peer,
                                        .first_byte = first_byte,
                                        .num_rows = of_segment.peer_rows(peer),
                                        .row_bytes = of_segment.wire_bytes(segments_[s].slots[i], peer)});
      const int64_t num_bytes = block.num_rows * block.row_bytes;
      first_byte += (num_bytes + kMaxWordBytes - 1) / kMaxWordBytes * kMaxWordBytes;
    }
  }
  return first_byte;
}

void ExchangeCall::allocate_wire() {
  int64_t next_byte = 0;
  for (auto* blocks : {&sent_blocks_, &received_blocks_}) {
    blocks->reserve(static_cast<size_t>(num_slots_) * static_cast<size_t>(num_peers()));
  }
  const auto add_others = [&](std::vector<WireBlock>& blocks, SegmentEnd Segment::*end) {
    std::vector<int64_t> bytes(static_cast<size_t>(num_peers()), 0);
    for (int32_t peer = 0; peer < num_peers(); ++peer) {
      if (peer == this_peer()) continue;
      const int64_t first_byte = std::exchange(next_byte, add_peer(blocks, end, peer, next_byte));
      bytes[static_cast<size_t>(peer)] = next_byte - first_byte;
    }
    return bytes;
  };
  sent_bytes_ = add_others(sent_blocks_, &Segment::send);
  own_begin_ = next_byte;
  own_end_ = add_peer(sent_blocks_, &Segment::send, this_peer(), own_begin_);
  next_byte = add_peer(received_blocks_, &Segment::recv, this_peer(), own_begin_);
  KNAPFORMER_ASSERT(next_byte == own_end_);
  received_bytes_ = add_others(received_blocks_, &Segment::recv);
  wire_ = empty_recycled({next_byte}, at::TensorOptions().dtype(at::kByte).device(device_));
}

void ExchangeCall::allocate_outputs() {
  for (Segment& segment : segments_) {
    for (Slot& slot : segment.slots) slot.output = empty_recycled(slot.output_shape, slot.input.options());
  }
}

std::vector<at::Tensor> ExchangeCall::outputs() const {
  std::vector<at::Tensor> outputs;
  outputs.reserve(static_cast<size_t>(num_slots_));
  for (const Segment& segment : segments_) {
    for (const Slot& slot : segment.slots) {
      if (slot.sum.defined()) slot.output.copy_(slot.sum);
      outputs.push_back(slot.output);
    }
  }
  return outputs;
}

}  // namespace knapformer
