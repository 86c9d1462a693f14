#include "knapformer/torch/comm/peer_memory.h"

#include <algorithm>

namespace knapformer {
namespace {

namespace symmetric_memory = c10d::symmetric_memory;

constexpr int kChannel = 0;  // of the barriers: all are on one stream

}  // namespace

bool PeerMemory::serves(at::Device device) { return symmetric_memory::has_allocator(device.type()); }

std::unique_ptr<PeerMemory::Lease> PeerMemory::take(int64_t num_bytes, at::Device device) {
  const std::lock_guard lock(mutex_);
  const auto is_free = [&](const std::shared_ptr<Slot>& slot) {
    return !slot->in_use && slot->barriers_before_free < num_barriers_ && slot->memory.device() == device;
  };
  auto free = std::ranges::find_if(slots_, is_free);
  if (free == slots_.end()) {
    free = slots_.insert(free, make_slot(num_bytes, device));
  } else if ((*free)->memory.numel() < num_bytes) {
    *free = make_slot(num_bytes, device);
  }
  (*free)->in_use = true;
  return std::make_unique<Lease>(shared_from_this(), *free);
}

std::shared_ptr<PeerMemory::Slot> PeerMemory::make_slot(int64_t num_bytes, at::Device device) const {
  constexpr int64_t kGrain = 2 << 20;  // steps differ: room for a longer one, in pages of a GPU
  const int64_t capacity = (num_bytes + num_bytes / 4 + kGrain - 1) / kGrain * kGrain;
  auto slot = std::make_shared<Slot>();
  slot->memory = symmetric_memory::empty_strided_p2p({capacity}, {1}, at::kByte, device, std::nullopt, std::nullopt);
  slot->handle = symmetric_memory::rendezvous(slot->memory, group_);
  for (void* memory : slot->handle->get_buffer_ptrs()) slot->of_peers.push_back(static_cast<std::byte*>(memory));
  return slot;
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
