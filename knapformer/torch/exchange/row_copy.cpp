#include "knapformer/torch/exchange/row_copy.h"

#include <ATen/Parallel.h>

#include <cstring>
#include <type_traits>
#include <utility>

namespace knapformer {
namespace {

/// copy_run(from, to, number of rows), for all rows of the copy.
template <class CopyRun>
void for_each_run(const RowCopy& copy, CopyRun copy_run) {
  const std::byte* from = copy.from;
  std::byte* to = copy.to;
  if (copy.from_runs.empty() && copy.to_runs.empty()) {
    copy_run(from, to, copy.num_rows);
  } else if (copy.from_runs.empty()) {
    for (const RowRun& run : copy.to_runs) {
      copy_run(from, to + run.first_row * copy.to_stride, run.num_rows);
      from += run.num_rows * copy.from_stride;
    }
  } else if (copy.to_runs.empty()) {
    for (const RowRun& run : copy.from_runs) {
      copy_run(from + run.first_row * copy.from_stride, to, run.num_rows);
      to += run.num_rows * copy.to_stride;
    }
  } else {
    for_each_common_run(copy.from_runs, copy.to_runs, &RowRun::first_row, &RowRun::num_rows,
                        [&](int64_t from_row, int64_t to_row, int64_t num_rows) {
                          copy_run(from + from_row * copy.from_stride, to + to_row * copy.to_stride, num_rows);
                        });
  }
}

/// Known widths let the compiler turn a row's copy into one load and one store: side features are often that narrow.
template <int64_t kWidth>
void copy_narrow_rows(const RowCopy& copy, const std::byte* from, std::byte* to, int64_t num_rows) {
  for (; num_rows > 0; --num_rows, from += copy.from_stride, to += copy.to_stride) std::memcpy(to, from, kWidth);
}

/// visit(what copies rows that are one after another at either end: (from, to, number of rows)).
template <class Visit>
void with_copier(const RowCopy& copy, Visit visit) {
  const auto narrow = [&]<int64_t kWidth>(std::integral_constant<int64_t, kWidth>) {
    visit([&copy](const std::byte* from, std::byte* to, int64_t num_rows) {
      copy_narrow_rows<kWidth>(copy, from, to, num_rows);
    });
  };
  if (copy.from_stride == copy.width && copy.to_stride == copy.width) {
    return visit([&copy](const std::byte* from, std::byte* to, int64_t num_rows) {
      std::memcpy(to, from, static_cast<size_t>(num_rows * copy.width));
    });
  }
  switch (copy.width) {
    case 1:
      return narrow(std::integral_constant<int64_t, 1>());
    case 2:
      return narrow(std::integral_constant<int64_t, 2>());
    case 4:
      return narrow(std::integral_constant<int64_t, 4>());
    case 8:
      return narrow(std::integral_constant<int64_t, 8>());
    case 16:
      return narrow(std::integral_constant<int64_t, 16>());
    default:
      visit([&copy](const std::byte* from, std::byte* to, int64_t num_rows) {
        for (; num_rows > 0; --num_rows, from += copy.from_stride, to += copy.to_stride) {
          std::memcpy(to, from, static_cast<size_t>(copy.width));
        }
      });
  }
}

void copy_rows(const RowCopy& copy) {
  with_copier(copy, [&](auto copy_run) { for_each_run(copy, copy_run); });
}

/// The rows [begin, end) of the copy.
void copy_rows(const RowCopy& copy, int64_t begin, int64_t end) {
  with_copier(copy, [&](auto copy_run) {
    int64_t first = 0;  // of the run at hand, among the rows of the copy
    for_each_run(copy, [&](const std::byte* from, std::byte* to, int64_t num_rows) {
      const int64_t skipped = std::max<int64_t>(begin - first, 0);
      const int64_t wanted = std::min(end - first, num_rows) - skipped;
      first += num_rows;
      if (wanted > 0) copy_run(from + skipped * copy.from_stride, to + skipped * copy.to_stride, wanted);
    });
  });
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

void CopyList::add(RowCopy copy) {
  if (copy.width == 0 || copy.num_rows == 0) return;
  if (copy.from_runs.size() == 1) copy.from += std::exchange(copy.from_runs, {})[0].first_row * copy.from_stride;
  if (copy.to_runs.size() == 1) copy.to += std::exchange(copy.to_runs, {})[0].first_row * copy.to_stride;
  copies_.push_back(copy);
  num_bytes_ += copy.width * copy.num_rows;
}

void CopyList::run() const {
  constexpr int64_t kBytesWorthAThread = 256 << 10;
  if (num_bytes_ <= kBytesWorthAThread || at::get_num_threads() == 1 || at::in_parallel_region()) {
    for (const RowCopy& copy : copies_) copy_rows(copy);
    return;
  }
  at::parallel_for(0, num_bytes_, kBytesWorthAThread,
                   [this](int64_t begin, int64_t end) { copy_bytes({copies_.data(), copies_.size()}, begin, end); });
}

}  // namespace knapformer
