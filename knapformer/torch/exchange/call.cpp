#include "knapformer/torch/exchange/call.h"

#include <ATen/ops/empty.h>

#include "knapformer/core/util/error.h"
#include "knapformer/torch/exchange/recycled_memory.h"

namespace knapformer {
namespace {

/// Rows dense in themselves, so that a row is one run of bytes; what lies between rows does not matter (a view into a
/// fused q, k, v projection travels without a copy).
at::Tensor with_dense_rows(const at::Tensor& tensor) {
  at::Tensor plain = tensor.resolve_conj().resolve_neg();
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

/// What the tables say, against what the arguments say of them.
void check_tables(const Segment& segment, const HeadSharing& sharing, const Segment& first, const std::string& label) {
  const int32_t num_peers = first.send.num_peers();
  const HeadGroup& group = segment.send.head_group;
  const bool one_group = segment.send.num_peers() == num_peers && segment.recv.num_peers() == num_peers;
  const bool same_sharing = segment.send.heads_shared() == (sharing.shared_end == HeadSharing::kSend) &&
                            segment.recv.heads_shared() == (sharing.shared_end == HeadSharing::kRecv);
  const bool group_fits =
      group.holds(segment.send.this_peer()) && group.first_peer >= 0 && group.first_peer + group.degree <= num_peers;
  if (!one_group || !same_sharing || !group_fits) {
    throw ArgumentError(text(label, ": got tables of several groups, or that share heads in another way than told"));
  }
}

}  // namespace

SegmentEnd::SegmentEnd(const PackedEnd& end, HeadSharing sharing)
    : PackedEndView(end), head_group{.first_peer = this_peer() - sharing.index_in_group, .degree = sharing.degree} {}

std::span<const int32_t> SegmentEnd::heads_of(const Slot& slot, int32_t peer) const {
  if (!head_group.holds(peer)) return {};
  return slot.shares->of(peer - head_group.first_peer);
}

int64_t SegmentEnd::wire_bytes(const Slot& slot, int32_t peer, int64_t row_bytes) const {
  if (shares_of(slot) == nullptr) return row_bytes;
  return static_cast<int64_t>(heads_of(slot, peer).size()) * slot.head_bytes;
}

int64_t Segment::sent_row_bytes(int32_t peer) const {
  int64_t bytes = 0;
  for (const Slot& slot : slots) bytes += send.wire_bytes(slot, peer, slot.input_row_bytes);
  return bytes;
}

int64_t Segment::received_row_bytes(int32_t peer) const {
  int64_t bytes = 0;
  for (const Slot& slot : slots) bytes += recv.wire_bytes(slot, peer, slot.output_row_bytes);
  return bytes;
}

ExchangeCall::ExchangeCall(const ExchangeArguments& arguments) {
  const std::string& label = arguments.label;
  if (arguments.tensors.empty()) throw ArgumentError(text(label, ": got no tensors, expected at least one"));
  device_ = arguments.tensors[0].device();
  segments_.reserve(arguments.segments.size());  // slots point into it
  size_t next = 0;
  for (const SegmentArguments& given : arguments.segments) {
    Segment& segment = segments_.emplace_back(Segment{.send = SegmentEnd(given.table.send, given.sharing),
                                                      .recv = SegmentEnd(given.table.recv, given.sharing),
                                                      .heads = head_partition(arguments.heads, given.sharing),
                                                      .slots = {}});
    check_tables(segment, given.sharing, segments_.front(), label);
    for (const HeadRole role : given.roles) {
      add_slot(segment, arguments.tensors[next], role, given.sharing, text(label, ": tensor ", next));
      ++next;
    }
  }
  if (engine() == ExchangeEngine::kCpu && !device_.is_cpu()) {
    throw ArgumentError(
        text(label, ": got tensors on ", device_, ", expected CPU tensors, as the tables were made for"));
  }
  count_bytes();
}

void ExchangeCall::add_slot(Segment& segment, const at::Tensor& tensor, HeadRole role, const HeadSharing& sharing,
                            const std::string& name) {
  const HeadShares* shares = shares_of(segment.heads, role);
  if (tensor.layout() != at::kStrided || tensor.dim() < (shares == nullptr ? 1 : 2)) {
    throw_argument(name, text(tensor.dim(), " dimensions in layout ", tensor.layout()),
                   text("a strided tensor of rows", shares == nullptr ? "" : " and heads"));
  }
  if (tensor.size(0) != segment.send.num_rows()) {
    throw_argument(name, text(tensor.size(0), " rows"), std::to_string(segment.send.num_rows()));
  }
  if (shares != nullptr && tensor.size(1) != num_heads_at(HeadSharing::kSend, *shares, sharing)) {
    throw_argument(name, text(tensor.size(1), " heads"),
                   std::to_string(num_heads_at(HeadSharing::kSend, *shares, sharing)));
  }
  if (sharing.shared_end != HeadSharing::kNeither && shares == nullptr) {
    throw_argument(name, "no role", "one where heads are shared");
  }
  if (tensor.device() != device_) throw_argument(name, tensor.device(), text(device_, ", as the first one is on"));

  Slot& slot = segment.slots.emplace_back(
      Slot{.input = with_dense_rows(tensor), .output_shape = tensor.sizes().vec(), .output = {}, .shares = shares});
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

void ExchangeCall::count_bytes() {
  sent_bytes_.assign(static_cast<size_t>(num_peers()), 0);
  received_bytes_.assign(static_cast<size_t>(num_peers()), 0);
  for (int32_t peer = 0; peer < num_peers(); ++peer) {
    if (peer == this_peer()) continue;
    int64_t &sent = sent_bytes_[static_cast<size_t>(peer)], &received = received_bytes_[static_cast<size_t>(peer)];
    for (const Segment& segment : segments_) {
      if (const int64_t rows = segment.send.peer_rows(peer)) sent += rows * segment.sent_row_bytes(peer);
      if (const int64_t rows = segment.recv.peer_rows(peer)) received += rows * segment.received_row_bytes(peer);
    }
    total_sent_bytes_ += sent;
    total_received_bytes_ += received;
  }
}

void ExchangeCall::allocate_outputs() {
  for (Segment& segment : segments_) {
    for (Slot& slot : segment.slots) {
      slot.output = device_.is_cpu() ? empty_recycled(slot.output_shape, slot.input.scalar_type())
                                     : at::empty(slot.output_shape, slot.input.options());
    }
  }
}

std::vector<at::Tensor> ExchangeCall::outputs() const {
  std::vector<at::Tensor> outputs;
  for (const Segment& segment : segments_) {
    for (const Slot& slot : segment.slots) outputs.push_back(slot.output);
  }
  return outputs;
}

}  // namespace knapformer
