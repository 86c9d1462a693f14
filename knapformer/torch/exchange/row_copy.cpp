#include "knapformer/torch/exchange/row_copy.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>
#include <span>

namespace knapformer {
namespace {

/// Known widths let the compiler turn a row's copy into one load and one store: side features are often that narrow.
template <int64_t kWidth>
void copy_narrow_rows(const RowCopy& copy, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    std::memcpy(copy.to + row * copy.to_stride, copy.from + row * copy.from_stride, kWidth);
  }
}

void copy_rows(const RowCopy& copy, int64_t begin, int64_t end) {
  if (copy.from_stride == copy.width && copy.to_stride == copy.width) {
    std::memcpy(copy.to + begin * copy.width, copy.from + begin * copy.width,
                static_cast<size_t>((end - begin) * copy.width));
    return;
  }
  switch (copy.width) {
    case 1:
      return copy_narrow_rows<1>(copy, begin, end);
    case 2:
      return copy_narrow_rows<2>(copy, begin, end);
    case 4:
      return copy_narrow_rows<4>(copy, begin, end);
    case 8:
      return copy_narrow_rows<8>(copy, begin, end);
    case 16:
      return copy_narrow_rows<16>(copy, begin, end);
    default:
      for (int64_t row = begin; row < end; ++row) {
        std::memcpy(copy.to + row * copy.to_stride, copy.from + row * copy.from_stride,
                    static_cast<size_t>(copy.width));
      }
  }
}

/// The rows whose first byte, counted through the list, lies in [begin, end).
void copy_bytes(std::span<const RowCopy> copies, int64_t begin, int64_t end) {
  int64_t first = 0;  // byte of the copy at hand
  for (const RowCopy& copy : copies) {
    if (first >= end) return;
    const int64_t last = first + copy.width * copy.num_rows;
    if (last > begin) {
      const auto row_at = [&](int64_t byte) {
        return std::clamp<int64_t>((byte - first + copy.width - 1) / copy.width, 0, copy.num_rows);
      };
      copy_rows(copy, row_at(begin), row_at(end));
    }
    first = last;
  }
}

}  // namespace

void CopyList::add(const RowCopy& copy) {
  if (copy.width == 0 || copy.num_rows == 0) return;
  copies_.push_back(copy);
  num_bytes_ += copy.width * copy.num_rows;
}

void CopyList::run() const {
  constexpr int64_t kBytesWorthAThread = 256 << 10;
  if (num_bytes_ <= kBytesWorthAThread || at::get_num_threads() == 1 || at::in_parallel_region()) {
    for (const RowCopy& copy : copies_) copy_rows(copy, 0, copy.num_rows);
    return;
  }
  at::parallel_for(0, num_bytes_, kBytesWorthAThread,
                   [this](int64_t begin, int64_t end) { copy_bytes(copies_, begin, end); });
}

}  // namespace knapformer
