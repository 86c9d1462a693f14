#include "knapformer/torch/exchange/recycled_memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <bit>
#include <deque>
#include <memory>
#include <mutex>

namespace knapformer {
namespace {

/// Smaller ones stay in the heap's own free lists anyway.
constexpr size_t kMinBytes = size_t{1} << 20;

struct Block {
  c10::DataPtr memory;
  size_t capacity = 0;
};

class RecyclingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override {
    if (num_bytes < kMinBytes) return c10::GetCPUAllocator()->allocate(num_bytes);
    std::unique_ptr<Block> block = take(num_bytes);
    if (!block) {
      // Lengths change a little from step to step: sizes within an eighth share blocks.
      const size_t grain = std::bit_floor(num_bytes) / 8, capacity = (num_bytes + grain - 1) / grain * grain;
      block.reset(new Block{.memory = c10::GetCPUAllocator()->allocate(capacity), .capacity = capacity});
    }
    void* memory = block->memory.get();
    return {memory, block.release(), [](void* taken) { instance().keep(static_cast<Block*>(taken)); }, at::kCPU};
  }

  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }

  size_t bytes_kept() {
    const std::lock_guard lock(mutex_);
    return bytes_kept_;
  }

  static RecyclingAllocator& instance() {
    static auto* const allocator = new RecyclingAllocator;  // never destroyed: tensors may outlive static objects
    return *allocator;
  }

 private:
  std::unique_ptr<Block> take(size_t num_bytes) {
    const std::lock_guard lock(mutex_);
    // The one given back last is the likeliest to be in the cache still.
    const auto found = std::find_if(free_.rbegin(), free_.rend(), [&](const std::unique_ptr<Block>& block) {
      return block->capacity >= num_bytes && block->capacity <= num_bytes + num_bytes / 4;
    });
    if (found == free_.rend()) return nullptr;
    std::unique_ptr<Block> block = std::move(*found);
    free_.erase(std::next(found).base());
    bytes_kept_ -= block->capacity;
    return block;
  }

  void keep(Block* block) {
    const std::lock_guard lock(mutex_);
    free_.emplace_back(block);
    bytes_kept_ += block->capacity;
    for (; bytes_kept_ > kMaxKeptBytes; free_.pop_front()) bytes_kept_ -= free_.front()->capacity;
  }

  std::mutex mutex_;
  std::deque<std::unique_ptr<Block>> free_;  // given back longest ago first
  size_t bytes_kept_ = 0;
};

}  // namespace

at::Tensor empty_recycled(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const at::ScalarType dtype = options.dtype().toScalarType();
  if (!options.device().is_cpu()) return at::empty(sizes, options);
  return at::detail::empty_generic(sizes, &RecyclingAllocator::instance(), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                   dtype, std::nullopt);
}

size_t recycled_bytes_kept() { return RecyclingAllocator::instance().bytes_kept(); }

}  // namespace knapformer
