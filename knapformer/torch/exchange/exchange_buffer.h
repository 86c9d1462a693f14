// One exchange, resolved: which bytes of which rows travel to and from which peer, and how they get into the buffer of
// the all-to-all and out of it: by lists of copies of rows (copies.h), from tensors into the buffer, from the buffer
// into tensors, and of this rank's own rows from input to output. What adds up is added by ATen.
//
// One buffer holds what the all-to-all sends and what it receives. This rank's own rows lie between the two, as the
// last of the rows sent and the first of the rows received, where they are packed only if they add up:
//
//   bytes of the buffer = | sent to others, by peer | own | received from others, by peer |
//   those of a peer     = | segment 0, slot 0: rows in wire order | segment 0, slot 1 | ... | segment 1, slot 0 | ... |
//   a row               = | all columns of the slot's tensor, or the peer's heads |
//
// The rows of a slot begin at a multiple of 16 bytes. So one narrow feature does not make the wide features beside it
// move byte by byte, neither here nor in the transport.
#pragma once

#include <ATen/core/DimVector.h>
#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "knapformer/core/plan/attention_shares.h"
#include "knapformer/torch/exchange/arguments.h"
#include "knapformer/torch/exchange/copies.h"

namespace knapformer {

/// Consecutive bytes of a tensor's row, counted from the row's first byte.
struct ColumnRun {
  int64_t first_byte = 0;
  int64_t num_bytes = 0;
};
using ColumnRuns = c10::SmallVector<ColumnRun, 4>;

/// A tensor of a segment.
struct Slot {
  at::Tensor input;  // each row is dense; rows are input.stride(0) apart
  at::DimVector output_shape;
  at::Tensor output = {};              // contiguous
  at::Tensor sum = {};                 // where values add up: the sum, which becomes the output
  const HeadShares* shares = nullptr;  // by its role; null: all columns meet every peer
  int64_t head_bytes = 0;              // of one head, where there are shares
  int64_t input_row_bytes = 0;         // all columns, as in the next
  int64_t output_row_bytes = 0;
  int64_t input_stride_bytes = 0;  // between rows
};

/// One end of a segment.
struct SegmentEnd {
  const PackedEnd& rows;
  bool sends;
  HeadSharing sharing;
  int32_t this_peer;

  /// Bytes of a row of the slot's tensor at this end.
  int64_t row_bytes(const Slot& slot) const { return sends ? slot.input_row_bytes : slot.output_row_bytes; }
  /// How the peers share a slot's heads at this end; null: all columns meet every peer.
  const HeadShares* shares_of(const Slot& slot) const { return rows.heads_shared ? slot.shares : nullptr; }
  std::span<const int32_t> heads_of(const Slot& slot, int32_t peer) const;
  /// Bytes of a row that meet `peer` here.
  int64_t wire_bytes(const Slot& slot, int32_t peer) const;
  ColumnRuns columns_of(const Slot& slot, int32_t peer) const;
};

struct Segment {
  SegmentEnd send;
  SegmentEnd recv;
  std::shared_ptr<const HeadPartition> heads;  // slots point into it
  std::vector<Slot> slots;

  /// Several values on the wire belong to one of the output: they add up.
  bool sums(const Slot& slot) const {
    const HeadShares* shares = recv.shares_of(slot);
    return recv.rows.has_duplicate_rows || (shares != nullptr && shares->has_duplicates());
  }
};

/// Rows of a slot that meet one peer, in the buffer.
struct WireBlock {
  const Segment* segment = nullptr;
  Slot* slot = nullptr;
  const SegmentEnd* end = nullptr;
  int32_t peer = 0;
  int64_t first_byte = 0;  // of the buffer
  int64_t num_rows = 0;
  int64_t row_bytes = 0;

  bool sums() const { return segment->sums(*slot); }
};

class ExchangeBuffer {
 public:
  /// Throws ArgumentError where the tensors do not fit the tables. Lays out and allocates the buffer. Refers to the
  /// arguments.
  ExchangeBuffer(at::TensorList tensors, const ExchangeArguments& arguments);
  ExchangeBuffer(const ExchangeBuffer&) = delete;  // blocks point into segments
  ExchangeBuffer& operator=(const ExchangeBuffer&) = delete;

  /// Before the all-to-all. Where the packing kernel does it, this rank's own rows are copied in the same launch.
  void pack();
  /// While the bytes travel.
  void move_own();
  /// When they are there. Returns the outputs.
  std::vector<at::Tensor> unpack();

  at::Device device() const { return device_; }
  const std::string& label() const { return label_; }

  /// The buffer: uint8, on the tensors' device.
  const at::Tensor& wire() const { return wire_; }
  std::span<const Segment> segments() const { return segments_; }
  /// In the order of the buffer, own rows included.
  const std::vector<WireBlock>& sent_blocks() const { return sent_blocks_; }
  const std::vector<WireBlock>& received_blocks() const { return received_blocks_; }

  /// What the all-to-all sends and receives, and its splits. A rank's rows for itself are not in it: their split is 0.
  at::Tensor sent() const { return wire_.as_strided({own_begin_}, {1}, 0); }
  at::Tensor received() const { return wire_.as_strided({wire_.numel() - own_end_}, {1}, own_end_); }
  const std::vector<int64_t>& sent_bytes() const { return sent_bytes_; }
  const std::vector<int64_t>& received_bytes() const { return received_bytes_; }

 private:
  void add_slot(Segment& segment, const at::Tensor& tensor, HeadRole role, const HeadSharing& sharing, size_t number);
  /// Appends the blocks that meet a peer, from `first_byte` on. Returns the byte behind them.
  int64_t add_peer(std::vector<WireBlock>& blocks, SegmentEnd Segment::*end, int32_t peer, int64_t first_byte);
  void allocate_wire();
  /// Allocates the outputs, and adds the copies of this rank's own rows.
  void add_own(Copies& copies);
  /// Adds those of the rows of a block, between their tensor and the buffer.
  void add_wire_copies(Copies& copies, const WireBlock& block) const;
  void add_to_sum(const WireBlock& block) const;

  const PackedTable& first_table_;
  std::vector<Segment> segments_;
  int64_t num_slots_ = 0;
  at::Tensor wire_;
  std::vector<WireBlock> sent_blocks_, received_blocks_;
  std::vector<int64_t> sent_bytes_, received_bytes_;
  int64_t own_begin_ = 0, own_end_ = 0;
  at::Device device_ = at::kCPU;
  std::string label_;
};

}  // namespace knapformer
