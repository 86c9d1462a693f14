// One call of an exchange, resolved: what travels between which bytes.
//
// Tensors travel in *regions*: a region is one exchange table and the tensors that travel by it. All regions of a call
// share one all-to-all of bytes, so tensors of any dtype travel together and arrive bit for bit.
//
//   block for a peer = | region 0: rows in wire order      | region 1: ... |
//   a row            = | tensor 0 | tensor 1 | tensor 2 |    bytes of that row, all columns or the peer's heads
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "knapformer/core/heads.h"
#include "knapformer/torch/end_tensors.h"
#include "knapformer/torch/statement.h"

namespace knapformer {

/// Which heads of a tensor meet a peer at a shared end. A tensor with a role is (rows, heads, ...).
enum class HeadRole : int64_t { kNone = 0, kQuery = 1, kKeyValue = 2 };

/// Heads of the whole model at the shared end; 0 where no tensor has a role.
struct HeadCounts {
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;

  bool operator==(const HeadCounts&) const = default;
};

/// How a region's ranks share heads. Part of the op's arguments, where the tables' values are not known: in a traced
/// graph.
struct HeadSharing {
  enum End : int64_t { kNeither = 0, kSend = 1, kRecv = 2 };  // which end meets each peer with its share alone
  int64_t shared_end = kNeither;
  int64_t degree = 1;
  int64_t index_in_group = 0;

  static constexpr size_t kNumFields = 3;  // in the op's arguments
  static HeadSharing from(at::IntArrayRef sharing_of_regions, size_t region) {
    const int64_t* fields = sharing_of_regions.data() + region * kNumFields;
    return {.shared_end = fields[0], .degree = fields[1], .index_in_group = fields[2]};
  }
  HeadSharing inverse() const {
    return {.shared_end = shared_end == kNeither ? kNeither : kSend + kRecv - shared_end,
            .degree = degree,
            .index_in_group = index_in_group};
  }
};

/// Bytes of a tensor's row, from its first.
struct ColumnRun {
  int64_t first_byte = 0;
  int64_t num_bytes = 0;
};

/// A tensor of a region.
struct ExchangePart {
  at::Tensor input;  // rows are dense in themselves; between them input.stride(0)
  std::vector<int64_t> output_shape;
  at::Tensor output;                   // contiguous; allocated by ExchangeCall::allocate_outputs
  const HeadShares* shares = nullptr;  // of its role; null: all columns meet every peer
  int64_t head_bytes = 0;              // of one head, where there are shares
  int64_t input_row_bytes = 0;
  int64_t output_row_bytes = 0;
  int64_t input_stride_bytes = 0;  // between rows

  /// The runs of columns that meet `peer` at this end, of a tensor that has all columns of `row_bytes` there.
  template <class Visit>
  void for_each_column_run(const EndView& end, int32_t peer, int64_t row_bytes, Visit visit) const;
  /// Bytes of a row that meet `peer` at this end.
  int64_t wire_bytes(const EndView& end, int32_t peer, int64_t row_bytes) const;
};

struct ExchangeRegion {
  EndView send;
  EndView recv;
  at::Tensor send_index;
  at::Tensor recv_index;
  std::vector<ExchangePart> parts;

  /// Bytes of a row on the wire to (from) `peer`.
  int64_t sent_row_bytes(int32_t peer) const;
  int64_t received_row_bytes(int32_t peer) const;
  /// Several values on the wire belong to one of the output: they add up.
  bool sums(const ExchangePart& part) const {
    return recv.rows_repeat() || (recv.heads_shared() && part.shares != nullptr && part.shares->repeats());
  }
};

/// The op's arguments, by name. See exchange.h for their meaning.
struct ExchangeArguments {
  at::TensorList tensors;
  at::TensorList send;  // 3 a region: EndTensors
  at::TensorList recv;
  at::IntArrayRef region_sizes;
  at::IntArrayRef head_roles;
  at::IntArrayRef head_sharing;  // HeadSharing of each region
  HeadCounts heads;

  HeadSharing sharing_of(size_t region) const { return HeadSharing::from(head_sharing, region); }
};

/// What all ranks must agree on. label: "route(x,features[0])", the call and the names of its tensors.
Statement make_statement(const ExchangeArguments& arguments, at::IntArrayRef differentiable, std::string_view label);

class ExchangeCall {
 public:
  /// Throws ArgumentError where the tensors do not fit the tables. `label` opens the messages.
  ExchangeCall(const ExchangeArguments& arguments, std::string_view label);
  ExchangeCall(const ExchangeCall&) = delete;  // parts point into heads_
  ExchangeCall& operator=(const ExchangeCall&) = delete;

  /// Shapes of the outputs, and nothing more: for the meta kernel too, so it reads the tables' row tensors, not their
  /// values.
  static std::vector<std::vector<c10::SymInt>> output_shapes(const ExchangeArguments& arguments);

  void allocate_outputs();
  std::vector<at::Tensor> outputs() const;

  std::span<ExchangeRegion> regions() { return regions_; }
  std::span<const ExchangeRegion> regions() const { return regions_; }
  int32_t this_peer() const { return this_peer_; }
  int32_t num_peers() const { return num_peers_; }
  at::Device device() const { return device_; }
  ExchangeEngine engine() const { return regions_.front().send.engine(); }

  /// The all-to-all's splits. What a rank sends to itself does not enter it: 0.
  std::span<const int64_t> sent_bytes() const { return sent_bytes_; }
  std::span<const int64_t> received_bytes() const { return received_bytes_; }
  int64_t total_sent_bytes() const { return total_sent_bytes_; }
  int64_t total_received_bytes() const { return total_received_bytes_; }

 private:
  static ExchangePart make_part(const at::Tensor& tensor, const HeadShares* shares, const HeadSharing& sharing);
  void count_bytes();

  std::vector<HeadPartition> heads_;  // of each region
  std::vector<ExchangeRegion> regions_;
  std::vector<int64_t> sent_bytes_, received_bytes_;
  int64_t total_sent_bytes_ = 0, total_received_bytes_ = 0;
  int32_t this_peer_ = 0, num_peers_ = 1;
  at::Device device_ = at::kCPU;
};

template <class Visit>
void ExchangePart::for_each_column_run(const EndView& end, int32_t peer, int64_t row_bytes, Visit visit) const {
  if (shares == nullptr || !end.heads_shared()) {
    if (row_bytes > 0) visit(ColumnRun{.first_byte = 0, .num_bytes = row_bytes});
    return;
  }
  const HeadGroup group = end.head_group();
  if (peer < group.first_peer || peer >= group.first_peer + group.degree || head_bytes == 0) return;
  const std::span<const int32_t> heads = shares->of(peer - group.first_peer);
  for (size_t begin = 0; begin < heads.size();) {
    size_t stop = begin + 1;
    while (stop < heads.size() && heads[stop] == heads[stop - 1] + 1) ++stop;
    visit(ColumnRun{.first_byte = heads[begin] * head_bytes,
                    .num_bytes = static_cast<int64_t>(stop - begin) * head_bytes});
    begin = stop;
  }
}

}  // namespace knapformer
