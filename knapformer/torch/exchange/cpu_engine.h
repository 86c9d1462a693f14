// What the CPU engine is made of: copies of rows between buffers of two strides.
#pragma once

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "knapformer/core/plan/exchange_table.h"
#include "knapformer/core/util/error.h"

namespace knapformer {

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

/// A copy of the same columns of rows, which have one order at both ends.
struct RowCopy {
  const std::byte* from = nullptr;  // these columns of row 0
  std::byte* to = nullptr;
  int64_t from_stride = 0;  // bytes, as the following
  int64_t to_stride = 0;
  int64_t width = 0;
  int64_t num_rows = 0;
  std::span<const RowRun> from_runs = {};  // empty: consecutive rows from row 0. Must outlive the copy.
  std::span<const RowRun> to_runs = {};
};

/// A list of copies that do not overlap, run on ATen's threads.
class CopyList {
 public:
  void add(RowCopy copy);
  void run() const;

 private:
  c10::SmallVector<RowCopy, 8> copies_;  // so many need no memory from the heap
  int64_t num_bytes_ = 0;
};

}  // namespace knapformer
