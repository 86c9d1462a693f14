// CUDA's driver as far as tests need it (cuda_driver.cpp), loaded for as long as this lives.
#pragma once

#include <dlfcn.h>

#include <stdexcept>

namespace knapformer {

class LoadedDriver {
 public:
  /// Whether the machine's own driver is loaded, which would be found in place of this one.
  static bool has_real_one() {
    void* const driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (driver != nullptr) dlclose(driver);
    return driver != nullptr;
  }

  LoadedDriver() : library_(dlopen(SIMULATED_DRIVER, RTLD_NOW)) {
    if (library_ != nullptr) mode_ = reinterpret_cast<int (*)()>(dlsym(library_, "simulated_capture_mode"));
    if (mode_ == nullptr) throw std::runtime_error(dlerror());
  }
  ~LoadedDriver() { dlclose(library_); }
  LoadedDriver(const LoadedDriver&) = delete;
  LoadedDriver& operator=(const LoadedDriver&) = delete;

  /// Of the calling thread: 0 global, 2 relaxed.
  int mode() const { return mode_(); }

 private:
  void* library_;
  int (*mode_)() = nullptr;
};

}  // namespace knapformer
