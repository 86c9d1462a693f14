// One exchange, resolved: which bytes of which rows meet which peer.
//
//   block for a peer = | segment 0: rows in wire order     | segment 1: ... |
//   a row            = | slot 0   | slot 1   | slot 2   |    bytes of that row, all columns or the peer's heads
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "knapformer/core/plan/heads.h"
#include "knapformer/torch/exchange/arguments.h"

namespace knapformer {

/// Bytes of a tensor's row, from its first.
struct ColumnRun {
  int64_t first_byte = 0;
  int64_t num_bytes = 0;
};

/// A tensor of a segment.
struct Slot {
  at::Tensor input;  // rows are dense in themselves; between them input.stride(0)
  std::vector<int64_t> output_shape;
  at::Tensor output;                   // contiguous; allocated by ExchangeCall::allocate_outputs
  const HeadShares* shares = nullptr;  // of its role; null: all columns meet every peer
  int64_t head_bytes = 0;              // of one head, where there are shares
  int64_t input_row_bytes = 0;
  int64_t output_row_bytes = 0;
  int64_t input_stride_bytes = 0;  // between rows
};

/// One end of a segment.
struct SegmentEnd : PackedEndView {
  SegmentEnd(const PackedEnd& end, HeadSharing sharing);

  /// The heads of a slot that meet `peer` here; null: all columns meet it.
  const HeadShares* shares_of(const Slot& slot) const { return heads_shared() ? slot.shares : nullptr; }
  std::span<const int32_t> heads_of(const Slot& slot, int32_t peer) const;
  /// Bytes of a row that meet `peer` here, of a slot whose rows are `row_bytes` here.
  int64_t wire_bytes(const Slot& slot, int32_t peer, int64_t row_bytes) const;
  /// The runs of columns that meet `peer` here.
  template <class Visit>
  void for_each_column_run(const Slot& slot, int32_t peer, int64_t row_bytes, Visit visit) const;

  HeadGroup head_group;
};

struct Segment {
  SegmentEnd send;
  SegmentEnd recv;
  HeadPartition heads;
  std::vector<Slot> slots;

  /// Bytes of a row on the wire to (from) `peer`.
  int64_t sent_row_bytes(int32_t peer) const;
  int64_t received_row_bytes(int32_t peer) const;
  /// Several values on the wire belong to one of the output: they add up (duplicates.h).
  bool sums(const Slot& slot) const {
    const HeadShares* shares = recv.shares_of(slot);
    return recv.has_duplicates() || (shares != nullptr && shares->has_duplicates());
  }
};

class ExchangeCall {
 public:
  /// Throws ArgumentError where the tensors do not fit the tables.
  explicit ExchangeCall(const ExchangeArguments& arguments);
  ExchangeCall(const ExchangeCall&) = delete;  // slots point into their segment's heads
  ExchangeCall& operator=(const ExchangeCall&) = delete;

  void allocate_outputs();
  std::vector<at::Tensor> outputs() const;

  std::span<Segment> segments() { return segments_; }
  std::span<const Segment> segments() const { return segments_; }
  int32_t this_peer() const { return segments_.front().send.this_peer(); }
  int32_t num_peers() const { return segments_.front().send.num_peers(); }
  at::Device device() const { return device_; }
  ExchangeEngine engine() const { return segments_.front().send.engine(); }

  /// The all-to-all's splits. What a rank sends to itself does not enter it: 0.
  const std::vector<int64_t>& sent_bytes() const { return sent_bytes_; }
  const std::vector<int64_t>& received_bytes() const { return received_bytes_; }
  int64_t total_sent_bytes() const { return total_sent_bytes_; }
  int64_t total_received_bytes() const { return total_received_bytes_; }

 private:
  void add_slot(Segment& segment, const at::Tensor& tensor, HeadRole role, const HeadSharing& sharing,
                const std::string& name);
  void count_bytes();

  std::vector<Segment> segments_;
  std::vector<int64_t> sent_bytes_, received_bytes_;
  int64_t total_sent_bytes_ = 0, total_received_bytes_ = 0;
  at::Device device_ = at::kCPU;
};

template <class Visit>
void SegmentEnd::for_each_column_run(const Slot& slot, int32_t peer, int64_t row_bytes, Visit visit) const {
  if (shares_of(slot) == nullptr) {
    if (row_bytes > 0) visit(ColumnRun{.first_byte = 0, .num_bytes = row_bytes});
    return;
  }
  const std::span<const int32_t> heads = heads_of(slot, peer);
  if (slot.head_bytes == 0) return;
  for (size_t begin = 0; begin < heads.size();) {
    size_t stop = begin + 1;
    while (stop < heads.size() && heads[stop] == heads[stop - 1] + 1) ++stop;
    visit(ColumnRun{.first_byte = heads[begin] * slot.head_bytes,
                    .num_bytes = static_cast<int64_t>(stop - begin) * slot.head_bytes});
    begin = stop;
  }
}

}  // namespace knapformer
