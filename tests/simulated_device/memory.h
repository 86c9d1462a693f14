// Memory of the simulated device: two mappings of the same pages. Tensors hold addresses of the first, which cannot be
// read or written: host code that touches device memory ends the process. Kernels go through the second.
//
// Another process may map the pages in the same two ways: this simulates memory that devices access in each other.
//
// Memory is filled with 0xff (a NaN, -1) when it is allocated and when it is freed: a value that was never written, or
// not yet, shows.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace simulated_device {

class DeviceMemory {
 public:
  static DeviceMemory& instance();

  void* allocate(size_t num_bytes);
  void free(void* address);
  /// The address by which a kernel reads and writes what is at `address`.
  std::byte* for_kernels(const void* address) const;
  bool owns(const void* address) const;

  /// The memory of this process's device, as others open it.
  std::string file() const;
  /// The address here of what is at `offset` in another process's `file`, which is mapped if it is not yet.
  void* of_peer(const std::string& file, size_t offset);
  size_t offset_of(const void* address) const { return static_cast<const std::byte*>(address) - own_.base; }

 private:
  DeviceMemory();

  /// Both mappings of a device's pages.
  struct Pages {
    std::byte* base = nullptr;
    std::byte* kernel_base = nullptr;
  };
  static Pages map(int file);
  const Pages* pages_of(const void* address) const;

  static constexpr size_t kBytes = size_t{4} << 30, kGrain = 512;
  int file_ = -1;
  Pages own_;
  mutable std::mutex mutex_;
  std::map<std::string, Pages> of_peers_;  // by file; never unmapped
  size_t used_ = 0;
  std::map<size_t, std::vector<std::byte*>> free_;  // by size
  std::map<void*, size_t> sizes_;
};

/// Host memory that a device may copy from while the host goes on.
class PinnedMemory final : public c10::Allocator {
 public:
  static PinnedMemory& instance();

  c10::DataPtr allocate(size_t num_bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }
  bool owns(const void* address);

 private:
  static void release(void* address);

  std::mutex mutex_;
  std::set<const void*> begins_;
};

}  // namespace simulated_device
