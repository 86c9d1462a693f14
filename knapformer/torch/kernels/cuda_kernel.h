// A kernel on CUDA devices: compiled at run time by NVRTC, which torch's CUDA builds bring, and launched by the driver.
// Both are opened when they are first needed, so that nothing of CUDA is needed to build or to install.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "knapformer/torch/kernels/kernel_source.h"

namespace knapformer {

/// The path of a library in the folder of libc10, where torch's own are.
std::string path_beside_torch(std::string_view name);

/// What NVRTC makes of a source.
struct CompiledKernel {
  std::vector<char> image;  // machine code; if NVRTC does not know the architecture, PTX for the newest older one
  std::string log;          // with machine code: of each function the registers and the local memory that it takes
  std::string error;        // why there is no image; otherwise empty
};

/// architecture: 90 for compute capability 9.0. `ptx`: PTX in place of machine code.
CompiledKernel compile_kernel(const KernelSource& source, int architecture, bool ptx = false);

/// One for each source and device of the process. Thread-safe.
class CudaKernel {
 public:
  /// source: one that stays until the process ends.
  static CudaKernel& on(at::Device device, const KernelSource& source);

  /// Why it cannot be launched; otherwise empty. The first call compiles.
  const std::string& error();
  /// Launches on the current stream of the device. function: an index into the source's functions. argument: points to
  /// the function's only argument, of the type that it takes. Returns why the launch did not start; otherwise empty.
  std::string launch(size_t function, int64_t num_blocks, int num_threads, void* argument);

 private:
  CudaKernel(at::Device device, const KernelSource& source) : device_(device), source_(source) {}
  void load();

  at::Device device_;
  const KernelSource& source_;
  std::once_flag loaded_;
  std::string error_;
  std::vector<void*> functions_;  // CUfunction, each
};

}  // namespace knapformer
