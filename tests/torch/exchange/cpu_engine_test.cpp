// The copies of the CPU engine, on several threads.
#include "knapformer/torch/exchange/cpu_engine.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cstring>

namespace knapformer {
namespace {

class Copies : public ::testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Threads, Copies, ::testing::Values(1, 2, 3));

/// Uneven runs of so many rows, and the same rows in runs that are cut elsewhere, at places that descend.
std::vector<RowRun> runs_of(int64_t num_rows, int64_t longest, bool descends) {
  std::vector<RowRun> runs;
  for (int64_t row = 0; row < num_rows; row += runs.back().num_rows) {
    const int64_t count = std::min<int64_t>(1 + row % longest, num_rows - row);
    runs.push_back({.first_row = descends ? num_rows - row - count : row, .num_rows = count});
  }
  return runs;
}

/// The row at each place of the order in which runs list them.
std::vector<int64_t> rows_in(const std::vector<RowRun>& runs, int64_t num_rows) {
  std::vector<int64_t> rows;
  for (const RowRun& run : runs) {
    for (int64_t i = 0; i < run.num_rows; ++i) rows.push_back(run.first_row + i);
  }
  for (int64_t row = 0; runs.empty() && row < num_rows; ++row) rows.push_back(row);
  return rows;
}

TEST_P(Copies, MoveEveryRowOnce) {
  const int before = at::get_num_threads();
  at::set_num_threads(GetParam());
  for (const int64_t width : {1, 2, 3, 4, 8, 16, 24, 100, 1024}) {
    for (const int64_t padding : {0, 5}) {
      const int64_t num_rows = (600 << 10) / width, stride = width + padding;
      std::vector<uint8_t> from(static_cast<size_t>(num_rows * stride));
      for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<uint8_t>(i * 7919 >> 3);
      const std::vector<RowRun> none, ascending = runs_of(num_rows, 977, false),
                                      descending = runs_of(num_rows, 641, true);
      for (const auto& [from_runs, to_runs] : {std::pair(none, descending), std::pair(descending, none),
                                               std::pair(ascending, descending), std::pair(none, none)}) {
        std::vector<uint8_t> to(static_cast<size_t>(num_rows * width), 0);
        CopyList copies;
        const int64_t third = width / 3;  // two ranges of columns, each a copy of its own
        for (const auto& [first, num_bytes] : {std::pair(int64_t{0}, third), std::pair(third, width - third)}) {
          copies.add({.from = reinterpret_cast<const std::byte*>(from.data()) + first,
                      .to = reinterpret_cast<std::byte*>(to.data()) + first,
                      .from_stride = stride,
                      .to_stride = width,
                      .width = num_bytes,
                      .num_rows = num_rows,
                      .from_runs = from_runs,
                      .to_runs = to_runs});
        }
        copies.run();
        const std::vector<int64_t> from_rows = rows_in(from_runs, num_rows), to_rows = rows_in(to_runs, num_rows);
        for (size_t i = 0; i < from_rows.size(); ++i) {
          ASSERT_EQ(std::memcmp(to.data() + to_rows[i] * width, from.data() + from_rows[i] * stride,
                                static_cast<size_t>(width)),
                    0)
              << "width " << width << " row " << i;
        }
      }
    }
  }
  at::set_num_threads(before);
}

}  // namespace
}  // namespace knapformer
