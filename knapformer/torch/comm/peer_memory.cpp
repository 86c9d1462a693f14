#include "knapformer/torch/comm/peer_memory.h"

#include <ATen/ops/empty.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>

#include "knapformer/torch/comm/spare_events.h"

namespace knapformer {
namespace {

namespace symmetric_memory = c10d::symmetric_memory;

constexpr int kChannel = 0;  // for all barriers, which come one after another
/// The size of the kept part in landing parts: room for the results that are held at one time where blocks are
/// checkpointed.
constexpr int64_t kKept = 3;

int64_t aligned(int64_t num_bytes) {
  return (num_bytes + PeerMemory::kAlignment - 1) / PeerMemory::kAlignment * PeerMemory::kAlignment;
}

at::Tensor allocate(int64_t num_bytes, at::Device device) {
  return symmetric_memory::empty_strided_p2p({num_bytes}, {1}, at::kByte, device, std::nullopt, std::nullopt);
}

/// Makes a stream wait for all that another was given so far.
void follow(c10::Stream stream, c10::Stream before) {
  const std::shared_ptr<c10::Event> event = take_event(before.device());
  event->record(before);
  event->block(stream);
}

}  // namespace

bool PeerMemory::serves(at::Device device) { return symmetric_memory::has_allocator(device.type()); }

int64_t PeerMemory::Region::landing_at() const {
  return aligned(room.num_words * static_cast<int64_t>(sizeof(int64_t)));
}

PeerMemory::Caller PeerMemory::caller_on(at::Device device) {
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  const std::lock_guard lock(mutex_);
  const auto known = std::ranges::find_if(callers_, [&](const Caller& each) { return *each == stream; });
  return known != callers_.end() ? *known : callers_.emplace_back(std::make_shared<const c10::Stream>(stream));
}

c10::Stream PeerMemory::stream_behind(const Caller& caller) {
  const std::lock_guard lock(mutex_);
  if (!stream_ || stream_->device() != caller->device()) {
    // Of high priority, above attention, beside which it runs: peers wait for it.
    stream_ = c10::impl::VirtualGuardImpl(caller->device_type()).getNewStream(caller->device(), /*priority=*/-1);
  }
  // Asked before the wait: where nothing is read any more, the stream was given all that read before this.
  const auto over =
      std::stable_partition(callers_.begin(), callers_.end(), [](const Caller& each) { return each.use_count() > 1; });
  for (const Caller& each : callers_) follow(*stream_, *each);
  callers_.erase(over, callers_.end());
  return *stream_;
}

std::unique_ptr<PeerMemory::Lease> PeerMemory::take(Need need, at::Device device,
                                                    const std::function<void(int64_t)>& meet) {
  std::shared_ptr<Region> region;
  const Caller caller = device.is_cpu() ? nullptr : caller_on(device);
  {
    const std::lock_guard lock(mutex_);
    const auto free = std::ranges::find_if(regions_, [&](const std::shared_ptr<Region>& each) {
      return !each->in_use && each->memory.device() == device;
    });
    if (free != regions_.end()) region = *free;
    if (region && region->room.landing_bytes >= need.landing_bytes && region->room.num_words >= need.num_words) {
      region->in_use = true;
      return std::make_unique<Lease>(shared_from_this(), region, caller);
    }
  }
  return std::make_unique<Lease>(shared_from_this(), make_region(need, device, std::move(region), meet), caller);
}

std::shared_ptr<PeerMemory::Region> PeerMemory::make_region(Need need, at::Device device,
                                                            std::shared_ptr<Region> too_small,
                                                            const std::function<void(int64_t)>& meet) {
  // To free a region waits for the device, where an exchange may wait for a rank that has failed: not before all meet,
  // nor where they do not.
  const auto free_too_small = [&] {
    {
      const std::lock_guard lock(mutex_);
      std::erase(regions_, too_small);
    }
    too_small.reset();
  };
  auto region = std::make_shared<Region>();
  // With room for a longer step, as steps differ.
  region->room = {.num_words = need.num_words, .landing_bytes = aligned(need.landing_bytes + need.landing_bytes / 4)};
  const int64_t num_bytes = region->kept_at() + kKept * region->room.landing_bytes;
  try {
    region->memory = allocate(num_bytes, device);
  } catch (const c10::Error&) {  // out of memory: what is free may lie in torch's cache, from which this does not come
    auto* const cache = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
    if (cache != nullptr) cache->emptyCache();
    free_too_small();
    region->memory = allocate(num_bytes, device);
  }
  {
    const std::lock_guard lock(mutex_);
    region->in_use = true;
    regions_.push_back(region);
  }
  meet(++num_regions_made_);
  free_too_small();
  // Up to 2.13 torch clears a new region's signals on the default stream, behind what that was given before, and ranks
  // meet on their hosts alone: a peer's first signal could be lost. It also copies there where the peers' signals lie,
  // which a barrier on another stream could read too soon.
  const auto wait_for_device = [&] {
    if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
  };
  wait_for_device();
  region->handle = symmetric_memory::rendezvous(region->memory, group_);
  wait_for_device();
  for (void* block : region->handle->get_buffer_ptrs()) {  // in which the regions begin at an offset
    region->of_peers.push_back(static_cast<std::byte*>(block) + region->handle->get_offset());
  }
  return region;
}

std::shared_ptr<PeerMemory::Place> PeerMemory::Lease::keep(int64_t num_bytes) {
  const std::lock_guard lock(region_->mutex);
  int64_t offset = region_->kept_at();  // the first gap that is large enough
  for (const auto& [begin, size] : region_->kept) {
    if (begin - offset >= num_bytes) break;
    offset = begin + size;
  }
  if (region_->memory.numel() - offset < num_bytes) return nullptr;
  region_->kept[offset] = aligned(num_bytes);
  return std::make_shared<Place>(region_, offset, caller_);
}

PeerMemory::Place::~Place() {
  const std::lock_guard lock(region_->mutex);
  region_->kept.erase(offset_);
}

void PeerMemory::Lease::set_words(const std::vector<int64_t>& words) {
  const bool pinned = !region_->memory.is_cpu();
  const at::Tensor list =
      at::empty({static_cast<int64_t>(words.size())}, at::TensorOptions(at::kLong).pinned_memory(pinned));
  std::memcpy(list.mutable_data_ptr(), words.data(), words.size() * sizeof(int64_t));
  const auto num_bytes = static_cast<int64_t>(list.nbytes());
  region_->memory.narrow(0, 0, num_bytes).view(at::kLong).copy_(list, /*non_blocking=*/true);
}

void PeerMemory::Lease::barrier() { region_->handle->barrier(kChannel, static_cast<size_t>(peers_->timeout_.count())); }

void PeerMemory::Lease::on_its_stream(const std::function<void()>& launch) {
  if (!caller_) return launch();
  stream_ = peers_->stream_behind(caller_);
  const c10::StreamGuard guard(*stream_);
  launch();
}

void PeerMemory::Lease::wait() {
  if (stream_) follow(c10::impl::VirtualGuardImpl(stream_->device_type()).getStream(stream_->device()), *stream_);
  stream_.reset();
}

PeerMemory::Lease::~Lease() {
  try {
    // Where the exchange was not finished, on whatever stream this runs: the memory that it reads and writes goes back
    // to the caller's.
    if (stream_) follow(*caller_, *stream_);
  } catch (...) {  // the device has failed: nothing runs on it any more
  }
  const std::lock_guard lock(peers_->mutex_);
  region_->in_use = false;
}

}  // namespace knapformer
