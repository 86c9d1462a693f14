#include "knapformer/torch/exchange/call.h"

#include <ATen/ops/from_blob.h>

#include <numeric>
#include <utility>

#include "knapformer/core/util/error.h"
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

/// The widest word that divides a number of bytes.
int64_t word_of(int64_t num_bytes) { return num_bytes == 0 ? 1 : std::min(num_bytes & -num_bytes, kMaxWordBytes); }

/// The most bytes that can land at a rank, where ExchangeCall::bounds_bytes. It follows from the most rows that any
/// rank has, so all ranks know it without each other's tables.
int64_t max_landing_bytes(std::span<const Segment> segments) {
  const int32_t num_peers = segments[0].send.num_peers(), this_peer = segments[0].send.this_peer();
  std::vector<int64_t> from_peer(static_cast<size_t>(num_peers), 0);  // this rank's own rows included
  int64_t num_tensors = 0;
  bool sums = false;
  for (const Segment& segment : segments) {
    const SegmentEnd& shared = segment.send.heads_shared() ? segment.send : segment.recv;
    const int32_t degree = shared.sharing.degree, first = this_peer - shared.sharing.index_in_group;
    KNAPFORMER_ASSERT(first % degree == 0);
    int64_t row_bytes = 0;  // of the peer with the most heads
    for (int32_t peer = first; peer < first + degree; ++peer) {
      int64_t bytes = 0;
      for (const Slot& slot : segment.slots) bytes += shared.wire_bytes(slot, peer);
      row_bytes = std::max(row_bytes, bytes);
    }
    // A rank has at most max_rows rows in all segments together, so of the segments that it shares with a peer the one
    // with the widest rows counts.
    for (int32_t peer = 0; peer < num_peers; ++peer) {
      int64_t& bytes = from_peer[static_cast<size_t>(peer)];
      if (peer / degree == this_peer / degree) bytes = std::max(bytes, shared.max_rows() * row_bytes);
    }
    num_tensors += static_cast<int64_t>(segment.slots.size());
    sums |= std::ranges::any_of(segment.slots, [&](const Slot& slot) { return segment.sums(slot); });
  }
  const int64_t all = std::reduce(from_peer.begin(), from_peer.end());
  // Rows that add up land beside the outputs.
  return (sums ? 2 : 1) * all + num_tensors * (num_peers + 1) * PeerMemory::kAlignment;
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
  return slot.shares->of(index);
}

int64_t SegmentEnd::wire_bytes(const Slot& slot, int32_t peer) const {
  if (shares_of(slot) == nullptr) return row_bytes(slot);
  return static_cast<int64_t>(heads_of(slot, peer).size()) * slot.head_bytes;
}

ExchangeCall::ExchangeCall(const ExchangeArguments& arguments)
    : joined_end_(arguments.joined_end), num_local_rows_(arguments.num_local_rows), label_(arguments.label) {
  const std::string& label = label_;
  if (arguments.tensors.empty()) throw ArgumentError(text(label, ": got no tensors, expected at least one"));
  device_ = arguments.tensors[0].device();
  segments_.reserve(arguments.segments.size());  // slots point into it
  size_t next = 0;
  const bool splits = joined_end_ == HeadSharing::kSend;
  int64_t first_row = num_local_rows_;  // of a segment, in tensors that are joined
  std::vector<at::Tensor> tensors = arguments.tensors;
  if (splits) std::ranges::transform(tensors, tensors.begin(), with_dense_rows);
  for (const SegmentArguments& given : arguments.segments) {
    Segment& segment =
        segments_.emplace_back(Segment{.send = {PackedEndView(given.table.send), HeadSharing::kSend, given.sharing},
                                       .recv = {PackedEndView(given.table.recv), HeadSharing::kRecv, given.sharing},
                                       .heads = head_partition(arguments.heads, given.sharing.degree),
                                       .slots = {},
                                       .first_slot = num_slots_});
    check_tables(segment, given.sharing, segments_.front(), label);
    segment.slots.reserve(given.roles.size());
    for (const HeadRole role : given.roles) {
      const size_t number = next++;
      const at::Tensor& tensor = tensors[splits ? number % tensors.size() : number];
      if (!splits) {
        add_slot(segment, tensor, role, given.sharing, number);
        continue;
      }
      const int64_t end = first_row + segment.send.num_rows();
      const bool is_last = segments_.size() == arguments.segments.size();
      if (tensor.size(0) < end || (is_last && tensor.size(0) > end)) {
        throw_argument(text(label, ": tensor ", number), text(tensor.size(0), " rows"), std::to_string(end));
      }
      add_slot(segment, tensor.narrow(0, first_row, end - first_row), role, given.sharing, number);
    }
    first_row += segment.send.num_rows();
  }
  if (engine() == ExchangeEngine::kCpu && !device_.is_cpu()) {
    throw ArgumentError(
        text(label, ": got tensors on ", device_, ", expected CPU tensors, as the tables were made for"));
  }
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
  slot.word_bytes = word_of(shares == nullptr ? slot.input_row_bytes : slot.head_bytes);
  slot.input_stride_bytes = slot.input.size(0) > 1 ? slot.input.stride(0) * item_bytes : slot.input_row_bytes;
}

int64_t ExchangeCall::add_peer(std::vector<WireBlock>& blocks, SegmentEnd Segment::*end, int32_t peer,
                               int64_t first_byte) {
  for (size_t s = 0; s < segments_.size(); ++s) {
    const SegmentEnd& of_segment = segments_[s].*end;
    WireBlock& block = blocks.emplace_back(WireBlock{.segment = s, .end = &of_segment, .peer = peer});
    block.first_byte = first_byte;
    block.num_rows = of_segment.peer_rows(peer);
    block.row_bytes = of_segment.for_each_slot(segments_[s].slots, peer, [](const Slot&, int64_t) {});
    first_byte += round_up(block.num_rows * block.row_bytes, kMaxWordBytes);
  }
  return first_byte;
}

void ExchangeCall::allocate_wire() {
  int64_t next_byte = 0;
  for (auto* blocks : {&sent_blocks_, &received_blocks_}) {
    blocks->reserve(segments_.size() * static_cast<size_t>(num_peers()));
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

bool ExchangeCall::bounds_bytes() const {
  return std::ranges::all_of(segments_, [&](const Segment& segment) {
    return segment.send.heads_shared() != segment.recv.heads_shared() && segment.send.max_rows() > 0 &&
           num_peers() % segment.send.sharing.degree == 0;
  });
}

void ExchangeCall::use_peer_memory(CommGroup& group) {
  const PeerMemory::Need need{.num_words = num_peers() * num_slots_, .landing_bytes = max_landing_bytes(segments_)};
  lease_ = group.take_peer_memory(need, device_, label_);
  wire_ = lease_->memory();
  // Values that several ranks send for one row are added in this order, as in an exchange by all-to-all.
  add_peer(received_blocks_, &Segment::recv, this_peer(), 0);
  for (int32_t peer = 0; peer < num_peers(); ++peer) {
    if (peer == this_peer()) continue;
    add_peer(sent_blocks_, &Segment::send, peer, 0);
    add_peer(received_blocks_, &Segment::recv, peer, 0);
  }
  add_peer(sent_blocks_, &Segment::send, this_peer(), 0);

  const std::vector<NewTensor> outputs = new_outputs();
  int64_t num_bytes = 0;
  std::vector<int64_t> offsets;  // of the outputs, one behind the other
  for (const NewTensor& output : outputs) {
    offsets.push_back(num_bytes);
    const auto item_bytes = static_cast<int64_t>(output.options.dtype().itemsize());
    num_bytes += round_up(c10::multiply_integers(output.shape) * item_bytes, PeerMemory::kAlignment);
  }
  const std::shared_ptr<PeerMemory::Place> kept = num_bytes > 0 ? lease_->keep(num_bytes) : nullptr;
  const int64_t first_byte = kept ? kept->offset() : lease_->landing_at();
  std::vector<at::Tensor> landing;
  for (size_t i = 0; i < outputs.size(); ++i) {
    auto* const begin = static_cast<std::byte*>(wire_.mutable_data_ptr()) + first_byte + offsets[i];
    // The tensor keeps its place, or the memory that it is a part of, alive.
    const auto release = [kept, memory = wire_](void*) {};
    landing.push_back(at::from_blob(begin, outputs[i].shape, release, outputs[i].options, device_));
  }
  set_tensors(&Slot::landing, landing);
  if (kept) {
    set_tensors(&Slot::output, std::move(landing));
  } else {
    allocate_outputs();
  }

  int64_t next_byte = lease_->landing_at() + (kept ? 0 : num_bytes);  // for rows that add up
  words_.assign(static_cast<size_t>(need.num_words), 0);
  for (const WireBlock& block : received_blocks_) {
    if (block.peer == this_peer()) continue;
    const Segment& segment = segments_[block.segment];
    for (size_t i = 0; i < segment.slots.size(); ++i) {
      const Slot& slot = segment.slots[i];
      int64_t& word = words_[static_cast<size_t>(block.peer * num_slots_ + segment.first_slot) + i];
      if (!segment.sums(slot)) {
        word = static_cast<const std::byte*>(slot.landing.const_data_ptr()) - wire_bytes_at(0);
        continue;
      }
      word = next_byte;
      next_byte += round_up(block.num_rows * segment.recv.wire_bytes(slot, block.peer), PeerMemory::kAlignment);
    }
  }
  KNAPFORMER_ASSERT(next_byte <= lease_->landing_at() + need.landing_bytes);
}

int64_t ExchangeCall::num_bytes_written() const {
  int64_t num_bytes = 0;
  for (const WireBlock& block : sent_blocks_) {
    if (block.peer == this_peer()) continue;
    for (const Slot& slot : segments_[block.segment].slots) {
      num_bytes += block.num_rows * block.end->wire_bytes(slot, block.peer);
    }
  }
  return num_bytes;
}

void ExchangeCall::set_local(const std::vector<at::Tensor>& local) {
  const bool any = joined_end_ == HeadSharing::kRecv && num_local_rows_ > 0;
  const std::vector<Slot>& slots = segments_.front().slots;
  const size_t expected = any ? slots.size() : 0;
  if (local.size() != expected) {
    throw_argument(text(label_, ": local"), text(local.size(), " tensors"), std::to_string(expected));
  }
  for (size_t i = 0; i < local.size(); ++i) {
    at::DimVector shape = slots[i].output_shape;
    shape[0] = num_local_rows_;
    const at::Tensor& tensor = local[i];
    if (tensor.sizes() != at::IntArrayRef(shape) || tensor.device() != device_ ||
        tensor.scalar_type() != slots[i].input.scalar_type()) {
      throw_argument(text(label_, ": local[", i, "]"),
                     text(tensor.sizes(), " ", tensor.scalar_type(), " on ", tensor.device()),
                     text(at::IntArrayRef(shape), " ", slots[i].input.scalar_type(), " on ", device_));
    }
    local_.push_back(with_dense_rows(tensor));
  }
}

std::vector<ExchangeCall::LocalRows> ExchangeCall::local_rows() const {
  std::vector<LocalRows> rows;
  for (size_t i = 0; i < local_.size(); ++i) {
    rows.push_back({.from = local_[i],
                    .to = joined_[i].narrow(0, 0, num_local_rows_),
                    .row_bytes = segments_.front().slots[i].output_row_bytes});
  }
  return rows;
}

std::vector<ExchangeCall::NewTensor> ExchangeCall::new_outputs() const {
  std::vector<NewTensor> outputs;
  outputs.reserve(static_cast<size_t>(num_slots_));
  if (joined_end_ != HeadSharing::kRecv) {
    for (const Segment& segment : segments_) {
      for (const Slot& slot : segment.slots) {
        outputs.push_back({.shape = slot.output_shape, .options = slot.input.options()});
      }
    }
    return outputs;
  }
  int64_t num_rows = num_local_rows_;
  for (const Segment& segment : segments_) num_rows += segment.recv.num_rows();
  for (const Slot& slot : segments_.front().slots) {
    outputs.push_back({.shape = slot.output_shape, .options = slot.input.options()});
    outputs.back().shape[0] = num_rows;
  }
  return outputs;
}

void ExchangeCall::set_tensors(at::Tensor Slot::*of_slot, std::vector<at::Tensor> tensors) {
  if (joined_end_ != HeadSharing::kRecv) {
    auto next = tensors.begin();
    for (Segment& segment : segments_) {
      for (Slot& slot : segment.slots) slot.*of_slot = std::move(*next++);
    }
    return;
  }
  int64_t first_row = num_local_rows_;
  for (Segment& segment : segments_) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      segment.slots[i].*of_slot = tensors[i].narrow(0, first_row, segment.recv.num_rows());
    }
    first_row += segment.recv.num_rows();
  }
  if (of_slot == &Slot::output) joined_ = std::move(tensors);
}

void ExchangeCall::allocate_outputs() {
  const std::vector<NewTensor> wanted = new_outputs();
  std::vector<at::Tensor> outputs;
  outputs.reserve(wanted.size());
  for (const NewTensor& output : wanted) outputs.push_back(empty_recycled(output.shape, output.options));
  set_tensors(&Slot::output, std::move(outputs));
}

std::vector<at::Tensor> ExchangeCall::outputs() const {
  std::vector<at::Tensor> outputs;
  outputs.reserve(static_cast<size_t>(num_slots_));
  for (const Segment& segment : segments_) {
    for (const Slot& slot : segment.slots) {
      if (slot.sum.defined()) slot.output.copy_(slot.sum);
      if (joined_.empty()) outputs.push_back(slot.output);
    }
  }
  return joined_.empty() ? outputs : joined_;
}

}  // namespace knapformer
