#include "memory.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

namespace simulated_device {

DeviceMemory& DeviceMemory::instance() {
  static auto* const memory = new DeviceMemory;  // never destroyed: tensors may outlive static objects
  return *memory;
}

DeviceMemory::DeviceMemory() {
  const int file = memfd_create("simulated device", 0);
  TORCH_CHECK(file >= 0 && ftruncate(file, kBytes) == 0, "simulated device: no memory");
  const auto map = [&](int access) {
    void* address = mmap(nullptr, kBytes, access, MAP_SHARED | MAP_NORESERVE, file, 0);
    TORCH_CHECK(address != MAP_FAILED, "simulated device: no memory");
    return static_cast<std::byte*>(address);
  };
  base_ = map(PROT_NONE);
  kernel_base_ = map(PROT_READ | PROT_WRITE);
  close(file);
}

void* DeviceMemory::allocate(size_t num_bytes) {
  const size_t size = (num_bytes + kGrain - 1) / kGrain * kGrain;
  const std::lock_guard lock(mutex_);
  std::byte* address = nullptr;
  if (std::vector<std::byte*>& free = free_[size]; !free.empty()) {
    address = free.back();
    free.pop_back();
  } else {
    TORCH_CHECK(used_ + size <= kBytes, "simulated device: out of memory");
    address = base_ + used_;
    used_ += size;
  }
  sizes_[address] = size;
  std::memset(for_kernels(address), 0xff, size);
  return address;
}

void DeviceMemory::free(void* address) {
  const std::lock_guard lock(mutex_);
  const auto it = sizes_.find(address);
  std::memset(for_kernels(address), 0xff, it->second);
  free_[it->second].push_back(static_cast<std::byte*>(address));
  sizes_.erase(it);
}

std::byte* DeviceMemory::for_kernels(const void* address) const {
  TORCH_CHECK(owns(address), "simulated device: a kernel was given an address of the host");
  return kernel_base_ + (static_cast<const std::byte*>(address) - base_);
}

bool DeviceMemory::owns(const void* address) const { return address >= base_ && address < base_ + kBytes; }

PinnedMemory& PinnedMemory::instance() {
  static auto* const memory = new PinnedMemory;
  return *memory;
}

c10::DataPtr PinnedMemory::allocate(size_t num_bytes) {
  void* address = std::aligned_alloc(64, (num_bytes + 64) / 64 * 64);
  const std::lock_guard lock(mutex_);
  begins_.insert(address);
  return {address, address, &release, at::kCPU};
}

c10::DeleterFnPtr PinnedMemory::raw_deleter() const { return &release; }

void PinnedMemory::release(void* address) {
  PinnedMemory& memory = instance();
  const std::lock_guard lock(memory.mutex_);
  memory.begins_.erase(address);
  std::free(address);
}

bool PinnedMemory::owns(const void* address) {
  const std::lock_guard lock(mutex_);
  return begins_.contains(address);
}

}  // namespace simulated_device
