// Torch's symmetric memory on the simulated device: the ranks of a group map each other's pages.
//
// The host waits in a barrier, where it is done: at its launch on the default stream, late on another (late_work.h). It
// counts as a collective, as a wait for one, and as a launch named "barrier".
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include "counters.h"
#include "late_work.h"
#include "memory.h"

namespace simulated_device {
namespace {

using c10d::symmetric_memory::SymmetricMemory;
using c10d::symmetric_memory::SymmetricMemoryAllocator;

constexpr size_t kMaxRanks = 64;
constexpr size_t kPadBytes = kMaxRanks * sizeof(uint32_t);  // they lie before the memory: a signal from each rank

std::runtime_error not_simulated() { return std::runtime_error("simulated device: not simulated"); }

class Memory final : public SymmetricMemory {
 public:
  Memory(int rank, std::vector<void*> pointers)
      : rank_(rank), pointers_(std::move(pointers)), made_at_(Counters::instance().waits_for_device) {}

  std::vector<void*> get_buffer_ptrs() override { return pointers_; }
  void barrier(int, size_t timeout_ms) override {
    Counters& counters = Counters::instance();
    // Up to 2.13 torch copies the addresses of the signals on the default stream.
    TORCH_CHECK(counters.waits_for_device > made_at_,
                "simulated device: a barrier may not know its signals yet, expected a wait for the device");
    counters.add_launch("barrier");
    ++counters.collectives;
    ++counters.waits_begun;
    LateWork::instance().launch(current_stream,
                                [self = c10::intrusive_ptr<Memory>::unsafe_reclaim_from_nonowning(this), timeout_ms] {
                                  self->meet(timeout_ms);
                                  ++Counters::instance().waits_ended;
                                });
  }
  int get_rank() override { return rank_; }
  int get_world_size() override { return static_cast<int>(pointers_.size()); }
  c10::Device get_device() override { return {c10::DeviceType::PrivateUse1, 0}; }

  std::vector<void*> get_signal_pad_ptrs() override { throw not_simulated(); }
  void** get_buffer_ptrs_dev() override { throw not_simulated(); }
  void** get_signal_pad_ptrs_dev() override { throw not_simulated(); }
  size_t get_buffer_size() override { throw not_simulated(); }
  size_t get_offset() override { return 0; }
  bool has_multicast_support() override { return false; }
  void* get_multicast_ptr() override { return nullptr; }
  void put_signal(int, int, size_t) override { throw not_simulated(); }
  void wait_signal(int, int, size_t) override { throw not_simulated(); }

 private:
  /// Each rank raises its signal at all others, then waits for theirs and clears them.
  void meet(size_t timeout_ms) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
    const auto change = [&](uint32_t& signal, uint32_t from, uint32_t to) {
      for (uint32_t seen = from; !std::atomic_ref(signal).compare_exchange_weak(seen, to); seen = from) {
        TORCH_CHECK(std::chrono::steady_clock::now() < end, "simulated device: a barrier timed out");
        std::this_thread::sleep_for(std::chrono::microseconds(20));
      }
    };
    for (const bool raises : {true, false}) {
      for (int peer = 0; peer < get_world_size(); ++peer) {
        if (peer != rank_) change(raises ? signal(peer, rank_) : signal(rank_, peer), raises ? 0 : 1, raises ? 1 : 0);
      }
    }
  }
  uint32_t& signal(int at, int from) {
    std::byte* pads = DeviceMemory::instance().for_kernels(static_cast<std::byte*>(pointers_[at]) - kPadBytes);
    return reinterpret_cast<uint32_t*>(pads)[from];
  }

  int rank_;
  std::vector<void*> pointers_;
  int64_t made_at_;  // the host's waits for the device until then
};

class PeerAllocator final : public SymmetricMemoryAllocator {
 public:
  void* alloc(size_t size, int, const std::optional<std::string>&) override {
    DeviceMemory& device = DeviceMemory::instance();
    auto* memory = static_cast<std::byte*>(device.allocate(kPadBytes + size));
    std::memset(device.for_kernels(memory), 0, kPadBytes);
    const std::lock_guard lock(mutex_);
    made_at_[memory + kPadBytes] = Counters::instance().waits_for_device;
    return memory + kPadBytes;
  }
  /// Frees nothing, as on a GPU, where memory lives on while peers have it mapped. There it waits for the device.
  void free(void*) override { Counters::instance().add_sync("free of peer memory"); }
  size_t get_alloc_size(void*) override { throw not_simulated(); }
  c10::intrusive_ptr<SymmetricMemory> rendezvous(void* memory, const std::optional<std::string>& name) override {
    const auto group = c10d::resolve_process_group(*name);
    const int rank = group->getRank(), num_ranks = group->getSize();
    TORCH_CHECK(num_ranks <= static_cast<int>(kMaxRanks), "simulated device: got a group of ", num_ranks, " ranks");
    DeviceMemory& device = DeviceMemory::instance();
    std::string prefix;
    {
      const std::lock_guard lock(mutex_);
      // Up to 2.13 torch clears the signals on the device, behind what that was given before, and ranks meet on their
      // hosts alone: a peer's signal may come before that.
      TORCH_CHECK(Counters::instance().waits_for_device > made_at_.at(memory),
                  "simulated device: signals of new peer memory may not be clear yet, expected a wait for the device");
      prefix = "peer memory/" + *name + "/" + std::to_string(num_met_[*name]++) + "/";
    }
    const auto key = [&](int of) { return prefix + std::to_string(of); };
    const std::string own = device.file() + " " + std::to_string(device.offset_of(memory));
    group->getStore()->set(key(rank), std::vector<uint8_t>(own.begin(), own.end()));
    std::vector<void*> pointers;
    for (int peer = 0; peer < num_ranks; ++peer) {
      const std::vector<uint8_t> bytes = group->getStore()->get(key(peer));
      const std::string of_peer(bytes.begin(), bytes.end());
      const size_t space = of_peer.find(' ');
      pointers.push_back(device.of_peer(of_peer.substr(0, space), std::stoull(of_peer.substr(space + 1))));
    }
    return c10::make_intrusive<Memory>(rank, std::move(pointers));
  }
  bool has_multicast_support(int) override { return false; }
  c10::DeviceType supported_device_type() override { return c10::DeviceType::PrivateUse1; }
  std::string name() override { return "simulated"; }

 private:
  std::mutex mutex_;
  std::map<std::string, int> num_met_;
  std::map<void*, int64_t> made_at_;  // the host's waits for the device until then
};

[[maybe_unused]] const bool registered = [] {
  c10d::symmetric_memory::register_allocator(c10::DeviceType::PrivateUse1, c10::make_intrusive<PeerAllocator>());
  return true;
}();

}  // namespace
}  // namespace simulated_device
