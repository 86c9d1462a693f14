// The copies of the CPU engine, on several threads.
#include "knapformer/torch/exchange/row_copy.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cstring>

namespace knapformer {
namespace {

class Copies : public ::testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Threads, Copies, ::testing::Values(1, 2, 3));

TEST_P(Copies, MoveEveryRowOnce) {
  const int before = at::get_num_threads();
  at::set_num_threads(GetParam());
  for (const int64_t width : {1, 2, 3, 4, 8, 16, 24, 100, 1024}) {
    const int64_t num_rows = (600 << 10) / width, stride = width + 5;
    std::vector<uint8_t> from(static_cast<size_t>(num_rows * stride));
    for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<uint8_t>(i * 7919 >> 3);
    std::vector<uint8_t> to(static_cast<size_t>(num_rows * width), 0);
    CopyList copies;
    // Runs of uneven lengths, in reverse at the other end.
    int64_t row = 0;
    std::vector<std::pair<int64_t, int64_t>> runs;
    while (row < num_rows) {
      const int64_t count = std::min<int64_t>(1 + row % 977, num_rows - row);
      runs.emplace_back(row, count);
      row += count;
    }
    const auto place_of = [&](int64_t first, int64_t count) { return num_rows - first - count; };
    for (const auto& [first, count] : runs) {
      copies.add({.from = reinterpret_cast<const std::byte*>(from.data()) + first * stride,
                  .to = reinterpret_cast<std::byte*>(to.data()) + place_of(first, count) * width,
                  .from_stride = stride,
                  .to_stride = width,
                  .width = width,
                  .num_rows = count});
    }
    copies.run();
    for (const auto& [first, count] : runs) {
      for (int64_t i = 0; i < count; ++i) {
        ASSERT_EQ(std::memcmp(to.data() + (place_of(first, count) + i) * width, from.data() + (first + i) * stride,
                              static_cast<size_t>(width)),
                  0)
            << "width " << width << " row " << first + i;
      }
    }
  }
  at::set_num_threads(before);
}

}  // namespace
}  // namespace knapformer
