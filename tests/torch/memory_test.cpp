// Recycled memory, and the copies of the CPU engine on several threads.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cstring>
#include <thread>

#include "knapformer/torch/recycled_memory.h"
#include "knapformer/torch/row_copy.h"

namespace knapformer {
namespace {

TEST(RecycledMemory, ServesTheNextTensorOfAboutThatSize) {
  const void* first = nullptr;
  {
    const at::Tensor tensor = empty_recycled({1000, 1000}, at::kFloat);
    first = tensor.const_data_ptr();
    EXPECT_TRUE(tensor.is_contiguous());
    EXPECT_EQ(tensor.sizes(), (std::vector<int64_t>{1000, 1000}));
    const at::Tensor other = empty_recycled({1000, 1000}, at::kFloat);
    EXPECT_NE(other.const_data_ptr(), first);  // the first is in use
    const at::Tensor view = tensor.narrow(0, 5, 2);
    const size_t kept = recycled_bytes_kept();
    EXPECT_EQ(recycled_bytes_kept(), kept);
  }
  // Given back in the order of destruction: `tensor` last.
  const at::Tensor again = empty_recycled({990, 1000}, at::kFloat);
  EXPECT_EQ(again.const_data_ptr(), first);
}

TEST(RecycledMemory, StaysWhileAnyViewLives) {
  at::Tensor view;
  const void* data = nullptr;
  {
    const at::Tensor tensor = empty_recycled({3, 1 << 20}, at::kByte);
    data = tensor.const_data_ptr();
    view = tensor.select(0, 2);
  }
  const at::Tensor other = empty_recycled({3, 1 << 20}, at::kByte);
  EXPECT_NE(other.const_data_ptr(), data);
}

TEST(RecycledMemory, KeepsAtMostItsLimit) {
  for (int64_t megabytes = 1; megabytes < 64; ++megabytes) empty_recycled({megabytes << 20}, at::kByte);
  EXPECT_LE(recycled_bytes_kept(), kMaxKeptBytes);
  EXPECT_GT(recycled_bytes_kept(), kMaxKeptBytes / 2);
  // A huge request is not answered with a block that it would waste, nor a small one with a huge block.
  const at::Tensor small = empty_recycled({2 << 20}, at::kByte);
  EXPECT_LT(small.storage().nbytes(), size_t{3} << 20);
}

TEST(RecycledMemory, ResizesLikeAnyTensor) {
  at::Tensor tensor = empty_recycled({2 << 20}, at::kByte);
  tensor.fill_(7);
  tensor.resize_({4 << 20});
  EXPECT_EQ(tensor[100].item<int64_t>(), 7);
  tensor[(4 << 20) - 1] = 3;
  EXPECT_EQ(tensor[(4 << 20) - 1].item<int64_t>(), 3);
}

TEST(RecycledMemory, IsSafeFromThreads) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      for (int i = 0; i < 200; ++i) {
        const at::Tensor tensor = empty_recycled({(1 << 20) + 1000 * i}, at::kByte);
        tensor.narrow(0, 0, 8).fill_(t);
        ASSERT_EQ(tensor[3].item<int64_t>(), t);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

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
