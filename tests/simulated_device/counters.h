// What a device was asked to do since the counters were reset.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace simulated_device {

struct Counters {
  std::atomic<int64_t> launches = 0;
  std::atomic<int64_t> collectives = 0;
  std::atomic<int64_t> copies_to_device = 0;
  std::atomic<bool> fails_to_pack = false;  // as a device without memory
  std::atomic<int64_t> packed_bytes = 0;    // read by the packing kernel; it writes as many, or fewer where it adds

  /// What made the host wait for the device, by name. On a GPU, torch.cuda.set_sync_debug_mode finds these.
  void add_sync(std::string name) { add(syncs_, std::move(name)); }
  /// "Non-blocking" copies from memory that is not pinned, which block all the same.
  void add_pageable_copy(std::string name) { add(pageable_copies_, std::move(name)); }
  /// What was launched, by name.
  void add_launch(std::string name) {
    ++launches;
    add(launched_, std::move(name));
  }

  std::vector<std::string> syncs() { return read(syncs_); }
  std::vector<std::string> pageable_copies() { return read(pageable_copies_); }
  std::vector<std::string> launched() { return read(launched_); }

  void reset() {
    const std::lock_guard lock(mutex_);
    launches = collectives = copies_to_device = packed_bytes = 0;
    syncs_.clear();
    pageable_copies_.clear();
    launched_.clear();
  }

  static Counters& instance() {
    static auto* const counters = new Counters;
    return *counters;
  }

 private:
  void add(std::vector<std::string>& list, std::string name) {
    const std::lock_guard lock(mutex_);
    list.push_back(std::move(name));
  }
  std::vector<std::string> read(const std::vector<std::string>& list) {
    const std::lock_guard lock(mutex_);
    return list;
  }

  std::mutex mutex_;
  std::vector<std::string> syncs_, pageable_copies_, launched_;
};

}  // namespace simulated_device
