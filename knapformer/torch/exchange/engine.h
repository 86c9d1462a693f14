// The engine: how rows get into the buffer of an all-to-all, and out of it.
//
// From the tables it makes lists of copies of rows: from tensors into the buffer, from the buffer into tensors, and of
// this rank's own rows from input to output. There are three ways to run a list. All make the same bytes, so ranks may
// mix them:
//
//   kCpu      memcpy of runs of rows, on ATen's threads. No index tensors and no temporaries
//   kDevice   ATen's index operations, on any device: an operation for each peer and tensor
//   kKernel   the packing kernel: one launch to pack, and one to unpack
#pragma once

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "knapformer/core/util/error.h"
#include "knapformer/torch/exchange/call.h"

namespace knapformer {

/// Rows of a tensor or of the buffer, and their bytes from some column on.
struct Rows {
  std::byte* first = nullptr;          // these columns of the tensor's first row; inputs are only read
  int64_t stride = 0;                  // bytes between rows
  const at::Tensor* tensor = nullptr;  // in whose memory they are
  const SegmentEnd* end = nullptr;     // those that meet `peer` here; null: all, in order
  int32_t peer = 0;
};

/// A copy of the same columns of rows that have one order at both ends.
struct RowCopy {
  Rows from, to;
  int64_t width = 0;  // bytes
  int64_t num_rows = 0;
};
using RowCopies = c10::SmallVector<RowCopy, 8>;  // so many need no memory from the heap

/// Serves one exchange, whose buffer is there: pack into it, then move_own while the bytes travel, then unpack when
/// they are there.
class Engine {
 public:
  /// In the way that the call's tables are for. Sums of a type that the kernel does not add are ATen's.
  explicit Engine(ExchangeCall& call);

  void pack();
  void move_own();
  /// Fills the call's outputs.
  void unpack();

 private:
  void add_wire_copies(RowCopies& copies, const WireBlock& block) const;
  void add_own_copies(RowCopies& copies, const WireBlock& block) const;
  void add_own(RowCopies& copies);
  void run(const RowCopies& copies) const;

  ExchangeCall& call_;
  ExchangeEngine way_;
};

/// The rows of a slot's input (or output) that meet `peer` at a send end (or receive end).
Rows rows_of(const Slot& slot, const SegmentEnd& end, int32_t peer);
/// The rows of a block in the buffer.
Rows rows_on_wire(const ExchangeCall& call, const WireBlock& block);

/// Cuts two lists of runs, which have the same total length, wherever either list is cut, and visits the pieces:
/// visit(begin of the piece in one list, begin in the other, length).
template <class Run, class Visit>
void for_each_common_run(std::span<const Run> from, std::span<const Run> to, int64_t Run::*begin, int64_t Run::*length,
                         Visit visit) {
  size_t f = 0, t = 0;
  int64_t f_done = 0, t_done = 0;
  while (f < from.size() && t < to.size()) {
    const int64_t common = std::min(from[f].*length - f_done, to[t].*length - t_done);
    visit(from[f].*begin + f_done, to[t].*begin + t_done, common);
    f_done += common;
    t_done += common;
    if (f_done == from[f].*length) ++f, f_done = 0;
    if (t_done == to[t].*length) ++t, t_done = 0;
  }
  KNAPFORMER_ASSERT(f == from.size() && t == to.size());
}

void copy_on_cpu(const RowCopies& copies);
void copy_by_aten(const RowCopies& copies);
/// One launch, or none where there is nothing to do. sums: adds also what the call sums (duplicates of rows and heads),
/// from the buffer and from its inputs.
void copy_by_kernel(ExchangeCall& call, const RowCopies& copies, bool sums);
/// Whether it adds all types whose sums the call needs.
bool kernel_adds(const ExchangeCall& call);

/// Without the kernel: adds what arrived in a block to its slot's sum, which begins as zeros. Sums are taken in float32
/// for half types, in one fixed order (this rank's own, then by peer), so that a run gives the same bits each time.
void add_block(ExchangeCall& call, const WireBlock& block);

}  // namespace knapformer
