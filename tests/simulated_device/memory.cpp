#include "memory.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

namespace simulated_device {

DeviceMemory& DeviceMemory::instance() {
  static auto* const memory = new DeviceMemory;  // never destroyed: tensors may outlive static objects
  return *memory;
}

DeviceMemory::DeviceMemory() : file_(memfd_create("simulated device", 0)) {
  TORCH_CHECK(file_ >= 0 && ftruncate(file_, kBytes) == 0, "simulated device: no memory");
  own_ = map(file_);
}

DeviceMemory::Pages DeviceMemory::map(int file) {
  const auto map_once = [&](int access) {
    void* address = mmap(nullptr, kBytes, access, MAP_SHARED | MAP_NORESERVE, file, 0);
    TORCH_CHECK(address != MAP_FAILED, "simulated device: no memory");
    return static_cast<std::byte*>(address);
  };
  return {.base = map_once(PROT_NONE), .kernel_base = map_once(PROT_READ | PROT_WRITE)};
}

std::string DeviceMemory::file() const { return "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(file_); }

void* DeviceMemory::of_peer(const std::string& file, size_t offset) {
  if (file == this->file()) return own_.base + offset;
  const std::lock_guard lock(mutex_);
  Pages& pages = of_peers_[file];
  if (pages.base == nullptr) {
    const int opened = open(file.c_str(), O_RDWR | O_CLOEXEC);
    TORCH_CHECK(opened >= 0, "simulated device: cannot open the memory of a peer, ", file);
    pages = map(opened);
    close(opened);
  }
  return pages.base + offset;
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
    address = own_.base + used_;
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

const DeviceMemory::Pages* DeviceMemory::pages_of(const void* address) const {
  const auto holds = [&](const Pages& pages) { return address >= pages.base && address < pages.base + kBytes; };
  if (holds(own_)) return &own_;
  const std::lock_guard lock(mutex_);
  for (const auto& [file, pages] : of_peers_) {
    if (holds(pages)) return &pages;
  }
  return nullptr;
}

std::byte* DeviceMemory::for_kernels(const void* address) const {
  const Pages* pages = pages_of(address);
  TORCH_CHECK(pages != nullptr, "simulated device: a kernel was given an address of the host");
  return pages->kernel_base + (static_cast<const std::byte*>(address) - pages->base);
}

bool DeviceMemory::owns(const void* address) const { return pages_of(address) != nullptr; }

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
