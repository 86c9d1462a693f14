#include "knapformer/torch/exchange_call.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "knapformer/core/error.h"
#include "knapformer/torch/recycled_memory.h"

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

/// Of the heads over the ranks that share them in a region; nothing where no tensor has a role.
HeadPartition partition_for(const ExchangeArguments& arguments, size_t region) {
  if (arguments.heads.num_heads == 0) return {};
  return partition_heads(arguments.heads.num_heads, arguments.heads.num_kv_heads,
                         static_cast<int32_t>(arguments.sharing_of(region).degree));
}

const HeadShares* shares_of(const HeadPartition& heads, HeadRole role) {
  if (role == HeadRole::kNone) return nullptr;
  return role == HeadRole::kQuery ? &heads.query : &heads.key_value;
}

/// The values of the tables, where they are known, against what the op was told of them.
void check_tables(const ExchangeRegion& region, const HeadSharing& sharing, const ExchangeRegion& first,
                  std::string_view label) {
  const bool one_group =
      region.send.num_peers() == first.send.num_peers() && region.recv.num_peers() == first.send.num_peers();
  const bool same_sharing = region.send.heads_shared() == (sharing.shared_end == HeadSharing::kSend) &&
                            region.recv.heads_shared() == (sharing.shared_end == HeadSharing::kRecv);
  const HeadGroup group = region.send.head_group();
  const bool same_share =
      sharing.shared_end == HeadSharing::kNeither ||
      (group.degree == sharing.degree && region.send.this_peer() - group.first_peer == sharing.index_in_group);
  if (!one_group || !same_sharing || !same_share) {
    throw ArgumentError(
        text(label, ": got tables of several groups, or of another sharing of heads than head_sharing says"));
  }
}

/// Heads that a tensor with these shares has on this rank at one end.
int64_t heads_at(HeadSharing::End end, const HeadShares& shares, const HeadSharing& sharing) {
  if (sharing.shared_end == end) return shares.num_heads;
  return static_cast<int64_t>(shares.of(static_cast<int32_t>(sharing.index_in_group)).size());
}

}  // namespace

int64_t ExchangePart::wire_bytes(const EndView& end, int32_t peer, int64_t row_bytes) const {
  if (shares == nullptr || !end.heads_shared()) return row_bytes;
  const HeadGroup group = end.head_group();
  if (peer < group.first_peer || peer >= group.first_peer + group.degree) return 0;
  return static_cast<int64_t>(shares->of(peer - group.first_peer).size()) * head_bytes;
}

int64_t ExchangeRegion::sent_row_bytes(int32_t peer) const {
  int64_t bytes = 0;
  for (const ExchangePart& part : parts) bytes += part.wire_bytes(send, peer, part.input_row_bytes);
  return bytes;
}

int64_t ExchangeRegion::received_row_bytes(int32_t peer) const {
  int64_t bytes = 0;
  for (const ExchangePart& part : parts) bytes += part.wire_bytes(recv, peer, part.output_row_bytes);
  return bytes;
}

Statement make_statement(const ExchangeArguments& arguments, at::IntArrayRef differentiable, std::string_view label) {
  const size_t open = label.find('('), close = label.rfind(')');
  const bool named = open != std::string_view::npos && close != std::string_view::npos;
  std::string_view names = named ? label.substr(open + 1, close - open - 1) : std::string_view();
  Statement statement(call_name(label));
  const HeadCounts& heads = arguments.heads;
  if (heads.num_heads > 0) {
    statement.add("heads",
                  std::to_string(heads.num_heads) + " query, " + std::to_string(heads.num_kv_heads) + " key/value");
  }
  bool has_rows = false;
  for (size_t i = 0; i < arguments.tensors.size(); ++i) {
    const at::Tensor& tensor = arguments.tensors[i];
    const auto role = static_cast<HeadRole>(arguments.head_roles[i]);
    // Heads as at the shared end: at the whole end ranks may have unequal shares.
    std::string value = std::string(c10::toString(tensor.scalar_type())) + " (rows";
    for (int64_t dim = 1; dim < tensor.dim(); ++dim) {
      int64_t size = tensor.size(dim);
      if (dim == 1 && role != HeadRole::kNone) size = role == HeadRole::kQuery ? heads.num_heads : heads.num_kv_heads;
      value.append(", ").append(std::to_string(size));
    }
    value.append(") on ").append(c10::DeviceTypeName(tensor.device().type(), /*lower_case=*/true));
    const size_t comma = names.find(',');
    const std::string_view name = names.substr(0, comma);
    statement.add(name.empty() ? "tensor " + std::to_string(i) : std::string(name), value);
    names = comma == std::string_view::npos ? std::string_view() : names.substr(comma + 1);
    statement.gradients.push_back(differentiable[i] != 0 ? '1' : '0');
    has_rows = has_rows || tensor.size(0) > 0;
  }
  statement.follows = !has_rows && at::GradMode::is_enabled();
  return statement;
}

std::vector<std::vector<c10::SymInt>> ExchangeCall::output_shapes(const ExchangeArguments& arguments) {
  std::vector<std::vector<c10::SymInt>> shapes;
  size_t next = 0;
  for (size_t r = 0; r < arguments.region_sizes.size(); ++r) {
    const HeadPartition heads = partition_for(arguments, r);
    const c10::SymInt rows = arguments.recv[r * kTensorsPerEnd + 1].sym_size(0);
    for (int64_t i = 0; i < arguments.region_sizes[r]; ++i, ++next) {
      std::vector<c10::SymInt> shape = arguments.tensors[next].sym_sizes().vec();
      shape[0] = rows;
      if (const HeadShares* shares = shares_of(heads, static_cast<HeadRole>(arguments.head_roles[next]))) {
        shape[1] = heads_at(HeadSharing::kRecv, *shares, arguments.sharing_of(r));
      }
      shapes.push_back(std::move(shape));
    }
  }
  return shapes;
}

ExchangeCall::ExchangeCall(const ExchangeArguments& arguments, std::string_view label) {
  const size_t num_regions = arguments.region_sizes.size();
  if (num_regions == 0 || arguments.tensors.empty() || arguments.send.size() != num_regions * kTensorsPerEnd ||
      arguments.recv.size() != num_regions * kTensorsPerEnd ||
      arguments.head_roles.size() != arguments.tensors.size() ||
      arguments.head_sharing.size() != num_regions * HeadSharing::kNumFields) {
    throw ArgumentError(
        text(label, ": got ", arguments.tensors.size(), " tensors in ", num_regions, " regions with ",
             arguments.send.size(), " and ", arguments.recv.size(), " tensors of tables, ", arguments.head_roles.size(),
             " roles and ", arguments.head_sharing.size(),
             " numbers of sharing, expected 3 table tensors a region and end, a role a tensor, 3 numbers a region"));
  }
  device_ = arguments.tensors[0].device();
  heads_.reserve(num_regions);  // parts point into it
  size_t next = 0;
  for (size_t r = 0; r < num_regions; ++r) {
    const size_t end = r * kTensorsPerEnd;
    const HeadSharing sharing = arguments.sharing_of(r);
    const HeadPartition& heads = heads_.emplace_back(partition_for(arguments, r));
    ExchangeRegion& region = regions_.emplace_back(ExchangeRegion{.send = EndView(arguments.send[end]),
                                                                  .recv = EndView(arguments.recv[end]),
                                                                  .send_index = arguments.send[end + 2],
                                                                  .recv_index = arguments.recv[end + 2],
                                                                  .parts = {}});
    check_tables(region, sharing, regions_.front(), label);
    for (int64_t i = 0; i < arguments.region_sizes[r]; ++i, ++next) {
      if (next >= arguments.tensors.size())
        throw ArgumentError(text(label, ": got fewer tensors than the regions count"));
      const at::Tensor& tensor = arguments.tensors[next];
      const HeadShares* shares = shares_of(heads, static_cast<HeadRole>(arguments.head_roles[next]));
      const std::string name = text(label, ": tensor ", next);
      if (tensor.layout() != at::kStrided || tensor.dim() < (shares == nullptr ? 1 : 2)) {
        throw_argument(name, text(tensor.dim(), " dimensions in layout ", tensor.layout()),
                       text("a strided tensor of rows", shares == nullptr ? "" : " and heads"));
      }
      if (tensor.size(0) != region.send.num_rows()) {
        throw_argument(name, text(tensor.size(0), " rows"), std::to_string(region.send.num_rows()));
      }
      if (shares != nullptr && tensor.size(1) != heads_at(HeadSharing::kSend, *shares, sharing)) {
        throw_argument(name, text(tensor.size(1), " heads"),
                       std::to_string(heads_at(HeadSharing::kSend, *shares, sharing)));
      }
      if (sharing.shared_end != HeadSharing::kNeither && shares == nullptr) {
        throw_argument(name, "no role", "one where heads are shared");
      }
      if (tensor.device() != device_) throw_argument(name, tensor.device(), text(device_, ", as the first one is on"));
      ExchangePart& part = region.parts.emplace_back(make_part(tensor, shares, sharing));
      part.output_shape[0] = region.recv.num_rows();
    }
  }
  if (next != arguments.tensors.size()) throw ArgumentError(text(label, ": got more tensors than the regions count"));
  if (engine() == ExchangeEngine::kRuns && !device_.is_cpu()) {
    throw ArgumentError(
        text(label, ": got tensors on ", device_, ", expected CPU tensors, as the tables were made for"));
  }
  this_peer_ = regions_[0].send.this_peer();
  num_peers_ = regions_[0].send.num_peers();
  count_bytes();
}

ExchangePart ExchangeCall::make_part(const at::Tensor& tensor, const HeadShares* shares, const HeadSharing& sharing) {
  ExchangePart part{
      .input = with_dense_rows(tensor), .output_shape = tensor.sizes().vec(), .output = {}, .shares = shares};
  const auto item_bytes = static_cast<int64_t>(tensor.itemsize());
  part.input_row_bytes = row_bytes_of(part.output_shape, item_bytes);
  if (shares != nullptr) {
    part.head_bytes = row_bytes_of(at::IntArrayRef(part.output_shape).slice(1), item_bytes);
    part.output_shape[1] = heads_at(HeadSharing::kRecv, *shares, sharing);
  }
  part.output_row_bytes = row_bytes_of(part.output_shape, item_bytes);
  part.input_stride_bytes = part.input.size(0) > 1 ? part.input.stride(0) * item_bytes : part.input_row_bytes;
  return part;
}

void ExchangeCall::count_bytes() {
  sent_bytes_.assign(static_cast<size_t>(num_peers_), 0);
  received_bytes_.assign(static_cast<size_t>(num_peers_), 0);
  for (int32_t peer = 0; peer < num_peers_; ++peer) {
    if (peer == this_peer_) continue;
    for (const ExchangeRegion& region : regions_) {
      const auto p = static_cast<size_t>(peer);
      if (const int64_t rows = region.send.peer_rows(peer)) sent_bytes_[p] += rows * region.sent_row_bytes(peer);
      if (const int64_t rows = region.recv.peer_rows(peer))
        received_bytes_[p] += rows * region.received_row_bytes(peer);
    }
    total_sent_bytes_ += sent_bytes_[static_cast<size_t>(peer)];
    total_received_bytes_ += received_bytes_[static_cast<size_t>(peer)];
  }
}

void ExchangeCall::allocate_outputs() {
  for (ExchangeRegion& region : regions_) {
    for (ExchangePart& part : region.parts) {
      part.output = device_.is_cpu() ? empty_recycled(part.output_shape, part.input.scalar_type())
                                     : at::empty(part.output_shape, part.input.options());
    }
  }
}

std::vector<at::Tensor> ExchangeCall::outputs() const {
  std::vector<at::Tensor> outputs;
  for (const ExchangeRegion& region : regions_) {
    for (const ExchangePart& part : region.parts) outputs.push_back(part.output);
  }
  return outputs;
}

}  // namespace knapformer
