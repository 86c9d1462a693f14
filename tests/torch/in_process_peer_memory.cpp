#include "tests/torch/in_process_peer_memory.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>
#include <vector>

namespace knapformer::testing {
namespace {

using c10d::symmetric_memory::SymmetricMemory;
using c10d::symmetric_memory::SymmetricMemoryAllocator;

std::atomic<int64_t> num_barriers = 0;
constexpr size_t kOffset = 128;  // of memory in its block

/// Where the ranks of a group show each other a pointer each, again and again.
class Meeting {
 public:
  explicit Meeting(size_t num_ranks) : num_ranks_(num_ranks), next_(num_ranks, 0) {}

  std::vector<void*> show(size_t rank, void* pointer) {
    std::unique_lock lock(mutex_);
    const int64_t round = next_[rank]++;
    Round& here = rounds_[round];
    here.pointers.resize(num_ranks_);
    here.pointers[rank] = pointer;
    ++here.num_come;
    changed_.notify_all();
    if (!changed_.wait_for(lock, std::chrono::seconds(20), [&] { return here.num_come == num_ranks_; })) {
      throw std::runtime_error("peer memory: not all ranks came");
    }
    const std::vector<void*> all = here.pointers;
    if (++here.num_gone == num_ranks_) rounds_.erase(round);
    return all;
  }

 private:
  struct Round {
    std::vector<void*> pointers;
    size_t num_come = 0, num_gone = 0;
  };
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t num_ranks_;
  std::vector<int64_t> next_;
  std::map<int64_t, Round> rounds_;
};

class Memory final : public SymmetricMemory {
 public:
  Memory(std::shared_ptr<Meeting> meeting, size_t rank, std::vector<std::shared_ptr<void>> blocks)
      : meeting_(std::move(meeting)), rank_(rank), blocks_(std::move(blocks)) {
    for (const std::shared_ptr<void>& block : blocks_) pointers_.push_back(block.get());
  }

  std::vector<void*> get_buffer_ptrs() override { return pointers_; }
  void barrier(int, size_t) override {
    ++num_barriers;
    meeting_->show(rank_, this);
  }
  int get_rank() override { return static_cast<int>(rank_); }
  int get_world_size() override { return static_cast<int>(pointers_.size()); }
  c10::Device get_device() override { return at::kCPU; }

  std::vector<void*> get_signal_pad_ptrs() override { throw not_needed(); }
  void** get_buffer_ptrs_dev() override { throw not_needed(); }
  void** get_signal_pad_ptrs_dev() override { throw not_needed(); }
  size_t get_buffer_size() override { throw not_needed(); }
  size_t get_offset() override { return kOffset; }
  bool has_multicast_support() override { return false; }
  void* get_multicast_ptr() override { return nullptr; }
  void put_signal(int, int, size_t) override { throw not_needed(); }
  void wait_signal(int, int, size_t) override { throw not_needed(); }

 private:
  static std::logic_error not_needed() { return std::logic_error("not needed by these tests"); }

  std::shared_ptr<Meeting> meeting_;
  size_t rank_;
  std::vector<std::shared_ptr<void>> blocks_;  // a peer's memory lives as long as somebody has it mapped
  std::vector<void*> pointers_;
};

class Allocator final : public SymmetricMemoryAllocator {
 public:
  /// Every other time there is no memory until more has been freed.
  void* alloc(size_t size, int, const std::optional<std::string>&) override {
    thread_local bool is_full = false;
    TORCH_CHECK(!(is_full = !is_full), "peer memory: out of memory");
    const size_t bytes = kOffset + (size + 63) / 64 * 64;
    auto* block = static_cast<std::byte*>(std::aligned_alloc(64, bytes));
    std::memset(block, 0xff, bytes);  // what nobody wrote is no number
    const std::lock_guard lock(mutex_);
    blocks_[block + kOffset] = std::shared_ptr<void>(block, &std::free);
    return block + kOffset;
  }
  void free(void* memory) override {
    const std::lock_guard lock(mutex_);
    blocks_.erase(memory);
  }
  size_t get_alloc_size(void*) override { return 0; }
  /// group: of InProcessWorld, "test.0.2@2" for rank 2 of the ranks 0 and 2.
  c10::intrusive_ptr<SymmetricMemory> rendezvous(void* memory, const std::optional<std::string>& group) override {
    const size_t at = group->find('@');
    const std::string members = group->substr(0, at), own = group->substr(at + 1);
    std::vector<std::string> ranks;
    std::istringstream list(members);
    for (std::string rank; std::getline(list, rank, '.');) ranks.push_back(rank);
    ranks.erase(ranks.begin());  // "test"
    const auto rank = static_cast<size_t>(std::ranges::find(ranks, own) - ranks.begin());
    std::shared_ptr<Meeting> meeting;
    {
      const std::lock_guard lock(mutex_);
      meeting = meetings_.try_emplace(members, std::make_shared<Meeting>(ranks.size())).first->second;
    }
    const std::vector<void*> memories = meeting->show(rank, memory);
    std::vector<std::shared_ptr<void>> blocks;
    {
      const std::lock_guard lock(mutex_);
      for (void* of_peer : memories) blocks.push_back(blocks_.at(of_peer));
    }
    meeting->show(rank, memory);  // all have them
    return c10::make_intrusive<Memory>(meeting, rank, std::move(blocks));
  }
  bool has_multicast_support(int) override { return false; }
  c10::DeviceType supported_device_type() override { return at::kCPU; }
  std::string name() override { return "in_process"; }

 private:
  std::mutex mutex_;
  std::map<void*, std::shared_ptr<void>> blocks_;
  std::map<std::string, std::shared_ptr<Meeting>> meetings_;
};

}  // namespace

void provide_peer_memory() { c10d::symmetric_memory::register_allocator(at::kCPU, c10::make_intrusive<Allocator>()); }

int64_t num_peer_barriers() { return num_barriers; }

}  // namespace knapformer::testing
