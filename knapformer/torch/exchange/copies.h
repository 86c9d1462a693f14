// Copies of rows into the buffer of an all-to-all, and out of it: a list, and three ways to run it. All make the same
// bytes, so ranks may mix them:
//
//   kCpu      memcpy, on ATen's threads; CPU tensors only
//   kKernel   the packing kernel (packing_kernel.h): one launch for the whole list
//   kDevice   ATen's index operations, on any device: an operation or two for each copy
//
// The packing kernel is an operation of torch, so that a device of torch's `privateuse1` can bring its own:
//
//   knapformer::move_rows(Tensor(a!) wire, Tensor work, int num_tiles, int num_bytes) -> ()
//
// `work` is what the kernel reads, on the host where it fits into the arguments of a launch, and on the device
// otherwise; `wire` is any tensor there, and tells torch which device. At most `num_bytes` bytes are read, and as many
// written: this is for profilers and dispatch modes, which see a launch as they see any other operation. On the CPU it
// is a loop, for tests; on CUDA, the kernel that NVRTC compiled.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstddef>
#include <cstdint>

#include "knapformer/torch/exchange/packing_kernel.h"
#include "knapformer/torch/exchange/table_tensors.h"

namespace knapformer {

/// The widest word that rows are moved by.
constexpr int64_t kMaxWordBytes = 16;

/// Rows of a tensor or of the buffer, and their bytes from some column on.
struct Rows {
  std::byte* first = nullptr;      // these columns of the tensor's first row; those that are copied from are only read
  int64_t stride = 0;              // bytes between rows
  const int64_t* index = nullptr;  // the rows' numbers, in the memory that the kernel sees; null: 0, 1, 2, ...
};

class Copies {
 public:
  /// Of the same columns, `width` bytes, of `num_rows` rows.
  void add(Rows from, int64_t from_byte, Rows to, int64_t to_byte, int64_t width, int64_t num_rows);
  /// On the current stream of the device of `wire`, which is any tensor there.
  void run(ExchangeEngine engine, const at::Tensor& wire);

 private:
  void launch(const at::Tensor& wire);

  c10::SmallVector<packing::Copy, 8> list_;  // so many need no memory from the heap
  int64_t num_bytes_ = 0;
};

/// The engine for tensors on this device: the CPU engine on the CPU, the kernel engine where the device has the kernel,
/// else the device engine. On CUDA the first call for a device compiles the kernel; where that is not possible, one
/// warning says why.
ExchangeEngine engine_for(at::Device device);

}  // namespace knapformer
