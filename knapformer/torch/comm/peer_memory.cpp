#include "knapformer/torch/comm/peer_memory.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

namespace knapformer {
namespace {

namespace symmetric_memory = c10d::symmetric_memory;

constexpr int kChannel = 0;  // of the barriers: one comes after another

}  // namespace

bool PeerMemory::serves(at::Device device) { return symmetric_memory::has_allocator(device.type()); }

std::shared_ptr<PeerMemory::Slot> PeerMemory::take_free(int64_t num_bytes, at::Device device) {
  const std::lock_guard lock(mutex_);
  follow_stream(device);
  const auto free = std::ranges::find_if(slots_, [&](const std::shared_ptr<Slot>& slot) {
    return !slot->in_use && slot->barriers_before_free < num_barriers_ && slot->memory.device() == device;
  });
  if (free == slots_.end()) return nullptr;
  std::shared_ptr<Slot> slot = *free;
  if (slot->memory.numel() < num_bytes) {
    slots_.erase(free);
    return nullptr;
  }
  slot->in_use = true;
  return slot;
}

void PeerMemory::follow_stream(at::Device device) {
  if (device.is_cpu()) return;
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  if (stream_ && *stream_ != stream) {
    c10::Event before(device.type());
    before.record(*stream_);
    before.block(stream);
  }
  stream_ = stream;
}

std::unique_ptr<PeerMemory::Lease> PeerMemory::take(int64_t num_bytes, at::Device device,
                                                    const std::function<void(int64_t)>& meet) {
  std::shared_ptr<Slot> slot = take_free(num_bytes, device);
  if (!slot) {
    constexpr int64_t kGrain = 2 << 20;  // steps differ: room for a longer one, in pages of a GPU
    const int64_t capacity = (num_bytes + num_bytes / 4 + kGrain - 1) / kGrain * kGrain;
    slot = std::make_shared<Slot>();
    slot->memory = symmetric_memory::empty_strided_p2p({capacity}, {1}, at::kByte, device, std::nullopt, std::nullopt);
    meet(++num_slots_made_);
    slot->handle = symmetric_memory::rendezvous(slot->memory, group_);
    for (void* memory : slot->handle->get_buffer_ptrs()) slot->of_peers.push_back(static_cast<std::byte*>(memory));
    slot->in_use = true;
    const std::lock_guard lock(mutex_);
    slots_.push_back(slot);
  }
  return std::make_unique<Lease>(shared_from_this(), slot);
}

void PeerMemory::Lease::barrier() {
  slot_->handle->barrier(kChannel, static_cast<size_t>(peers_->timeout_.count()));
  const std::lock_guard lock(peers_->mutex_);
  ++peers_->num_barriers_;
}

PeerMemory::Lease::~Lease() {
  const std::lock_guard lock(peers_->mutex_);
  slot_->in_use = false;
  slot_->barriers_before_free = peers_->num_barriers_;
}

}  // namespace knapformer
