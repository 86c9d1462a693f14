#include "knapformer/torch/exchange/recycled_memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <bit>
#include <list>
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
    Block* block = take(num_bytes);
    if (block == nullptr) {
      const size_t capacity = with_room_to_grow(num_bytes);
      block = new Block{.memory = c10::GetCPUAllocator()->allocate(capacity), .capacity = capacity};
    }
    return {block->memory.get(), block, &RecyclingAllocator::give_back, at::kCPU};
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
  /// Lengths change a little from step to step: sizes within an eighth share blocks.
  static size_t with_room_to_grow(size_t num_bytes) {
    const size_t grain = std::bit_floor(num_bytes) / 8;
    return (num_bytes + grain - 1) / grain * grain;
  }

  Block* take(size_t num_bytes) {
    const std::lock_guard lock(mutex_);
    // The one given back last is the likeliest to be in the cache still.
    for (auto it = free_.rbegin(); it != free_.rend(); ++it) {
      Block* block = *it;
      if (block->capacity < num_bytes || block->capacity > num_bytes + num_bytes / 4) continue;
      free_.erase(std::next(it).base());
      bytes_kept_ -= block->capacity;
      return block;
    }
    return nullptr;
  }

  static void give_back(void* context) { instance().keep(static_cast<Block*>(context)); }

  void keep(Block* block) {
    std::list<Block*> evicted;  // freed after the lock
    {
      const std::lock_guard lock(mutex_);
      free_.push_back(block);
      bytes_kept_ += block->capacity;
      while (bytes_kept_ > kMaxKeptBytes) {
        bytes_kept_ -= free_.front()->capacity;
        evicted.splice(evicted.end(), free_, free_.begin());
      }
    }
    for (const Block* old : evicted) delete old;
  }

  std::mutex mutex_;
  std::list<Block*> free_;  // given back longest ago first
  size_t bytes_kept_ = 0;
};

}  // namespace

at::Tensor empty_recycled(at::IntArrayRef sizes, at::ScalarType dtype) {
  size_t num_bytes = c10::elementSize(dtype);
  for (const int64_t size : sizes) num_bytes *= static_cast<size_t>(size);
  if (num_bytes < kMinBytes) return at::empty(sizes, at::TensorOptions().dtype(dtype));
  return at::detail::empty_generic(sizes, &RecyclingAllocator::instance(), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                   dtype, std::nullopt);
}

size_t recycled_bytes_kept() { return RecyclingAllocator::instance().bytes_kept(); }

}  // namespace knapformer
