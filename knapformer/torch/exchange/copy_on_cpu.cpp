// Copies of rows on the CPU: memcpy of runs of rows, straight from the tables, on ATen's threads.
#include <ATen/Parallel.h>

#include <cstring>
#include <type_traits>

#include "knapformer/torch/exchange/engine.h"

namespace knapformer {
namespace {

struct RunCopy {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  int64_t from_stride = 0, to_stride = 0, width = 0;  // bytes
  int64_t num_rows = 0;
  std::span<const RowRun> from_runs = {}, to_runs = {};  // empty: consecutive rows from row 0
};

RunCopy run_copy_of(const RowCopy& copy) {
  const auto runs_of = [](const Rows& rows, std::byte*& first) {
    std::span<const RowRun> runs;
    if (rows.end != nullptr) runs = rows.end->runs_of(rows.peer);
    first = rows.first + (runs.size() == 1 ? runs[0].first_row * rows.stride : 0);
    return runs.size() == 1 ? std::span<const RowRun>() : runs;
  };
  RunCopy made{
      .from_stride = copy.from.stride, .to_stride = copy.to.stride, .width = copy.width, .num_rows = copy.num_rows};
  std::byte* from = nullptr;
  made.from_runs = runs_of(copy.from, from);
  made.from = from;
  made.to_runs = runs_of(copy.to, made.to);
  return made;
}

/// copy_run(from, to, number of rows), for all rows of the copy. By value, here and below: bytes that are written might
/// be those of a RunCopy in memory, so that the compiler would load its strides again for every row.
template <class CopyRun>
void for_each_run(RunCopy copy, CopyRun copy_run) {
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
void copy_narrow_rows(RunCopy copy, const std::byte* from, std::byte* to, int64_t num_rows) {
  for (; num_rows > 0; --num_rows, from += copy.from_stride, to += copy.to_stride) std::memcpy(to, from, kWidth);
}

/// visit(copier): copier(from, to, number of rows) copies rows that are consecutive at both ends.
template <class Visit>
void with_copier(RunCopy copy, Visit visit) {
  const auto narrow = [&]<int64_t kWidth>(std::integral_constant<int64_t, kWidth>) {
    visit([copy](const std::byte* from, std::byte* to, int64_t num_rows) {
      copy_narrow_rows<kWidth>(copy, from, to, num_rows);
    });
  };
  if (copy.from_stride == copy.width && copy.to_stride == copy.width) {
    return visit([copy](const std::byte* from, std::byte* to, int64_t num_rows) {
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
      visit([copy](const std::byte* from, std::byte* to, int64_t num_rows) {
        for (; num_rows > 0; --num_rows, from += copy.from_stride, to += copy.to_stride) {
          std::memcpy(to, from, static_cast<size_t>(copy.width));
        }
      });
  }
}

void copy_rows(RunCopy copy) {
  with_copier(copy, [&](auto copy_run) { for_each_run(copy, copy_run); });
}

/// Copies the rows [begin, end) of the copy.
void copy_rows(RunCopy copy, int64_t begin, int64_t end) {
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

/// Copies the rows whose first byte, counted through the whole list, lies in [begin, end).
void copy_bytes(const RowCopies& copies, int64_t begin, int64_t end) {
  int64_t first = 0;  // byte of the copy at hand
  for (const RowCopy& copy : copies) {
    if (first >= end) return;
    const int64_t last = first + copy.width * copy.num_rows;
    if (last > begin) {
      const auto row_at = [&](int64_t byte) {
        return std::clamp<int64_t>((byte - first + copy.width - 1) / copy.width, 0, copy.num_rows);
      };
      copy_rows(run_copy_of(copy), row_at(begin), row_at(end));
    }
    first = last;
  }
}

}  // namespace

void copy_on_cpu(const RowCopies& copies) {
  constexpr int64_t kBytesWorthAThread = 256 << 10;
  int64_t num_bytes = 0;
  for (const RowCopy& copy : copies) num_bytes += copy.width * copy.num_rows;
  if (num_bytes <= kBytesWorthAThread || at::get_num_threads() == 1 || at::in_parallel_region()) {
    for (const RowCopy& copy : copies) copy_rows(run_copy_of(copy));
    return;
  }
  at::parallel_for(0, num_bytes, kBytesWorthAThread,
                   [&](int64_t begin, int64_t end) { copy_bytes(copies, begin, end); });
}

}  // namespace knapformer
