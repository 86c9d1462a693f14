// The packing kernel on CUDA devices: compiled at run time by NVRTC, which torch's CUDA builds bring, and launched by
// the driver. Both are opened when they are first needed, so that nothing of CUDA is needed to build or to install.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace knapformer {

/// The path of a library in the folder of libc10, where torch's own are.
std::string path_beside_torch(std::string_view name);

/// What NVRTC makes of the source.
struct CompiledKernel {
  std::vector<char> image;  // machine code
  std::string log;          // of each function the registers and the local memory that it takes
};

/// architecture: 90 for compute capability 9.0. Throws StateError, also for one that NVRTC does not know.
CompiledKernel compile_packing_kernel(int architecture);

/// One for each device of the process. Thread-safe.
class CudaKernel {
 public:
  static CudaKernel& on(at::Device device);

  /// Why it cannot be launched; otherwise empty. The first call compiles.
  const std::string& error();
  /// Launches on the current stream of the device. work: bytes of a packing::Work; on the host it goes into the
  /// launch's arguments. Throws StateError where the launch does not start.
  void launch(const at::Tensor& work, int64_t num_tiles);

 private:
  explicit CudaKernel(at::Device device) : device_(device) {}
  void load();

  at::Device device_;
  std::once_flag loaded_;
  std::string error_;
  void* by_argument_ = nullptr;  // CUfunction, as the next
  void* by_table_ = nullptr;
};

}  // namespace knapformer
