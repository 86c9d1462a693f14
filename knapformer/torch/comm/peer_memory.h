// Peer memory: each rank of a group writes into the memory of the others. It is torch's symmetric memory, over NVLink
// on GPUs.
//
// In place of an all-to-all, a rank writes its rows straight to their place in the memory of each peer. Only the
// receiver knows that place, so it publishes the offsets, in words that the peers' kernels read:
//
//   region of a rank = | words: where each slot of each sender lands | landing | kept |
//
//   start    words
//            barrier: all ranks have said where       on a stream of its own, behind what the caller's stream was given
//            write to the peers                       before
//            barrier: all ranks have written
//   finish   the caller's stream waits for that one; the host does not wait
//
// Results stay in the kept part for as long as somebody holds them. Where it has no room, peers write to the landing
// part, and the results are copied from there: the receiver decides this alone, for each exchange, as its peers need
// not know. Peers write nothing after the second barrier, and this rank reads nothing of the landing part after the
// first barrier of the next exchange of its region, which is behind all that callers' streams were given before. So a
// region serves any number of exchanges one after another, and exchanges that are in flight at the same time have a
// region each. The ranks of a group start and finish their exchanges in one order, so they choose the same regions
// without communication.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
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
  /// group: torch's name of a process group, all of whose ranks make a PeerMemory. timeout: of a barrier.
  PeerMemory(std::string group, std::chrono::milliseconds timeout) : group_(std::move(group)), timeout_(timeout) {}

  /// Whether torch has symmetric memory for such devices.
  static bool serves(at::Device device);

  /// What an exchange needs of a region, the same on all ranks.
  struct Need {
    int64_t num_words = 0;
    int64_t landing_bytes = 0;
  };
  /// Parts of a region begin at multiples of this many bytes: whole lines of memory, of which NVLink moves several.
  static constexpr int64_t kAlignment = 256;

 private:
  struct Region {
    at::Tensor memory;
    c10::intrusive_ptr<c10d::symmetric_memory::SymmetricMemory> handle;
    std::vector<std::byte*> of_peers;
    Need room;
    bool in_use = false;

    int64_t landing_at() const;
    int64_t kept_at() const { return landing_at() + room.landing_bytes; }

    std::mutex mutex;
    std::map<int64_t, int64_t> kept = {};  // sizes by offset, of places that somebody holds
  };
  /// A stream on which exchanges begin and end. Held by what is read there: exchanges in flight, and places.
  using Caller = std::shared_ptr<const c10::Stream>;

 public:
  /// A place in the kept part, reserved for as long as this object lives.
  class Place {
   public:
    Place(std::shared_ptr<Region> region, int64_t offset, Caller caller)
        : region_(std::move(region)), offset_(offset), caller_(std::move(caller)) {}
    ~Place();
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;

    /// Bytes from the beginning of the region.
    int64_t offset() const { return offset_; }

   private:
    std::shared_ptr<Region> region_;
    int64_t offset_;
    Caller caller_;
  };

  /// A region, for one exchange.
  class Lease {
   public:
    Lease(std::shared_ptr<PeerMemory> peers, std::shared_ptr<Region> region, Caller caller)
        : peers_(std::move(peers)), region_(std::move(region)), caller_(std::move(caller)) {}
    ~Lease();
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;

    /// This rank's memory of the region, as bytes.
    const at::Tensor& memory() const { return region_->memory; }
    /// Where the landing part begins in it.
    int64_t landing_at() const { return region_->landing_at(); }
    /// Reserves a place in the kept part. Null where there is no room.
    std::shared_ptr<Place> keep(int64_t num_bytes);
    /// Publishes where senders write: offsets in this rank's memory. Does not wait.
    void set_words(const std::vector<int64_t>& words);

    /// A peer's memory, for kernels of this rank.
    std::byte* of_peer(int32_t peer) const { return region_->of_peers[static_cast<size_t>(peer)]; }
    /// Where a word of a peer lies, for kernels of this rank that run after the first barrier.
    const std::byte* word_of_peer(int32_t peer, int64_t word) const {
      return of_peer(peer) + word * static_cast<int64_t>(sizeof(int64_t));
    }
    /// Has `launch` give its work to the stream of peer memory, behind what the stream was given so far on which this
    /// lease was taken. What is read and written there must be kept until wait().
    void on_its_stream(const std::function<void()>& launch);
    /// What the current stream runs after this barrier begins when all ranks have done what they launched before
    /// theirs. Collective.
    void barrier();
    /// Makes the current stream wait for what was launched on the stream of peer memory.
    void wait();

   private:
    std::shared_ptr<PeerMemory> peers_;
    std::shared_ptr<Region> region_;
    Caller caller_;                      // null on a CPU
    std::optional<c10::Stream> stream_;  // of peer memory, where nobody has waited for it
  };

  /// Takes the first free region. Where none is free or it is too small, makes a new one: this is collective, and waits
  /// for the other ranks and for the device. It calls meet(number of the new region) first, by which all ranks know
  /// that all come.
  std::unique_ptr<Lease> take(Need need, at::Device device, const std::function<void(int64_t)>& meet);

 private:
  /// A region in place of one that is too small, or of none.
  std::shared_ptr<Region> make_region(Need need, at::Device device, std::shared_ptr<Region> too_small,
                                      const std::function<void(int64_t)>& meet);
  /// The current stream, as a caller.
  Caller caller_on(at::Device device);
  /// The stream of peer memory, behind what this caller's stream was given so far, and those of earlier callers: they
  /// may still read what peers are about to overwrite.
  c10::Stream stream_behind(const Caller& caller);

  std::string group_;
  std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<Region>> regions_;
  int64_t num_regions_made_ = 0;
  std::optional<c10::Stream> stream_;
  std::vector<Caller> callers_;  // a stream each, until nothing is read there and somebody has waited for it
};

}  // namespace knapformer
