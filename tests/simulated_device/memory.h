// Memory of the simulated device: two mappings of the same pages. Tensors hold addresses of the first, which cannot be
// read or written: host code that touches device memory ends the process. Kernels go through the second.
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

 private:
  DeviceMemory();

  static constexpr size_t kBytes = size_t{4} << 30, kGrain = 512;
  std::byte* base_ = nullptr;  // of both mappings
  std::byte* kernel_base_ = nullptr;
  std::mutex mutex_;
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
