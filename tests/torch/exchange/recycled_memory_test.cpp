#include "knapformer/torch/exchange/recycled_memory.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <thread>

namespace knapformer {
namespace {

TEST(RecycledMemory, ServesTheNextTensorOfAboutThatSize) {
  const void* first = nullptr;
  {
    const at::Tensor tensor = empty_recycled({1000, 1000}, at::TensorOptions(at::kFloat));
    first = tensor.const_data_ptr();
    EXPECT_TRUE(tensor.is_contiguous());
    EXPECT_EQ(tensor.sizes(), (std::vector<int64_t>{1000, 1000}));
    const at::Tensor other = empty_recycled({1000, 1000}, at::TensorOptions(at::kFloat));
    EXPECT_NE(other.const_data_ptr(), first);  // the first is in use
    const at::Tensor view = tensor.narrow(0, 5, 2);
    const size_t kept = recycled_bytes_kept();
    EXPECT_EQ(recycled_bytes_kept(), kept);
  }
  // Given back in the order of destruction: `tensor` last.
  const at::Tensor again = empty_recycled({990, 1000}, at::TensorOptions(at::kFloat));
  EXPECT_EQ(again.const_data_ptr(), first);
}

TEST(RecycledMemory, StaysWhileAnyViewLives) {
  at::Tensor view;
  const void* data = nullptr;
  {
    const at::Tensor tensor = empty_recycled({3, 1 << 20}, at::TensorOptions(at::kByte));
    data = tensor.const_data_ptr();
    view = tensor.select(0, 2);
  }
  const at::Tensor other = empty_recycled({3, 1 << 20}, at::TensorOptions(at::kByte));
  EXPECT_NE(other.const_data_ptr(), data);
}

TEST(RecycledMemory, KeepsAtMostItsLimit) {
  for (int64_t megabytes = 1; megabytes < 64; ++megabytes)
    empty_recycled({megabytes << 20}, at::TensorOptions(at::kByte));
  EXPECT_LE(recycled_bytes_kept(), kMaxKeptBytes);
  EXPECT_GT(recycled_bytes_kept(), kMaxKeptBytes / 2);
  // A huge request is not answered with a block that it would waste, nor a small one with a huge block.
  const at::Tensor small = empty_recycled({2 << 20}, at::TensorOptions(at::kByte));
  EXPECT_LT(small.storage().nbytes(), size_t{3} << 20);
}

TEST(RecycledMemory, ResizesLikeAnyTensor) {
  at::Tensor tensor = empty_recycled({2 << 20}, at::TensorOptions(at::kByte));
  tensor.fill_(7);
  tensor.resize_({4 << 20});
  EXPECT_EQ(tensor[100].item<int64_t>(), 7);
  tensor[(4 << 20) - 1] = 3;
  EXPECT_EQ(tensor[(4 << 20) - 1].item<int64_t>(), 3);
}

TEST(RecycledMemory, ShrinksLikeAnyTensor) {
  // As untyped_storage().resize_() of Python asks its allocator, with which activations are let go and taken up again.
  const at::Tensor tensor = empty_recycled({2 << 20}, at::TensorOptions(at::kByte));
  for (const size_t num_bytes : {size_t{0}, size_t{1}, size_t{7}, size_t{1000}, size_t{1} << 21}) {
    const c10::DataPtr memory = tensor.storage().allocator()->allocate(num_bytes);
    if (num_bytes > 0) static_cast<char*>(memory.get())[num_bytes - 1] = 1;
  }
}

TEST(RecycledMemory, IsSafeFromThreads) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      for (int i = 0; i < 200; ++i) {
        const at::Tensor tensor = empty_recycled({(1 << 20) + 1000 * i}, at::TensorOptions(at::kByte));
        tensor.narrow(0, 0, 8).fill_(t);
        ASSERT_EQ(tensor[3].item<int64_t>(), t);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace knapformer
