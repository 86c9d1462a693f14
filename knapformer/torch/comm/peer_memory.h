// Memory that the ranks of a group read in each other: torch's symmetric memory, over NVLink on GPUs.
//
// In place of an all-to-all, a rank packs what it sends into a slot of its own memory, and each peer reads its part
// there. What they read lies where both know without a word, and when it is there a barrier on the device says:
//
//   start    pack into slot 0                           the host and the device go on
//   finish   barrier: all ranks have packed             the device waits, not the host
//            unpack from slot 0 of the peers
//   start    pack into slot 1                           peers may still read slot 0
//   finish   barrier: all ranks have packed, and so they have unpacked what was before on their streams
//   start    pack into slot 0
//
// So two slots serve any number of exchanges, one after another; each that is in flight beside others has its own. The
// ranks of a group start and finish their exchanges in one order, so they choose the same slots without a word, too.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>
#include <vector>

namespace knapformer {

/// Thread-safe.
class PeerMemory : public std::enable_shared_from_this<PeerMemory> {
 public:
  /// group: the name that torch knows a process group by; all its ranks make one. timeout: of a barrier.
  PeerMemory(std::string group, std::chrono::milliseconds timeout) : group_(std::move(group)), timeout_(timeout) {}

  /// Whether torch has symmetric memory for such devices.
  static bool serves(at::Device device);

 private:
  struct Slot {
    at::Tensor memory;
    c10::intrusive_ptr<c10d::symmetric_memory::SymmetricMemory> handle;
    std::vector<const std::byte*> of_peers;
    bool in_use = false;
    int64_t barriers_before_free = 0;  // peers may read it until there were more
  };

 public:
  /// A slot, for one exchange.
  class Lease {
   public:
    Lease(std::shared_ptr<PeerMemory> peers, std::shared_ptr<Slot> slot)
        : peers_(std::move(peers)), slot_(std::move(slot)) {}
    ~Lease();
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;

    /// This rank's, of bytes.
    const at::Tensor& memory() const { return slot_->memory; }
    /// A peer's, for kernels of this rank.
    const std::byte* of_peer(int32_t peer) const { return slot_->of_peers[static_cast<size_t>(peer)]; }
    /// Behind it on the present stream all ranks have done what they launched before theirs. Collective.
    void barrier();

   private:
    std::shared_ptr<PeerMemory> peers_;
    std::shared_ptr<Slot> slot_;
  };

  /// A slot of so many bytes, the same number on all ranks. Collective; waits for the others, and for the device, where
  /// no slot is free that is large enough: after meet(number of the new slot), by which all ranks know that all come.
  std::unique_ptr<Lease> take(int64_t num_bytes, at::Device device, const std::function<void(int64_t)>& meet);

 private:
  std::shared_ptr<Slot> take_free(int64_t num_bytes, at::Device device);
  /// Orders what this rank does on another stream than before behind all that it did there.
  void follow_stream(at::Device device);

  std::string group_;
  std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<Slot>> slots_;
  std::atomic<int64_t> num_slots_made_ = 0;
  int64_t num_barriers_ = 0;
  std::optional<c10::Stream> stream_;  // of the last exchange
};

}  // namespace knapformer
