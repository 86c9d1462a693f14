// knapformer::move_rows: a launch of the packing kernel, as an operation of torch.
//
//   move_rows(Tensor(a!) wire, Tensor work, int num_tiles, int num_bytes) -> ()
//
// `work` is what the kernel reads (packing_kernel.h), on the host where it fits into the arguments of a launch, and on
// the device otherwise; `wire` is any tensor there, and tells torch which device. At most `num_bytes` bytes are read,
// and as many written: this is for profilers and dispatch modes, which see a launch as they see any other operation.
//
// It is an operation so that a device of torch's `privateuse1` can bring its own kernel. On the CPU it is a loop, for
// tests; on CUDA, the kernel that NVRTC compiled.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "knapformer/torch/exchange/packed_table.h"

namespace knapformer {

/// The engine for tensors on this device: the CPU engine on the CPU, the kernel engine where the device has the kernel,
/// else the device engine. On CUDA the first call for a device compiles the kernel; where that is not possible, one
/// warning says why.
ExchangeEngine engine_for(at::Device device);

/// Launches on the device of `wire`, on the current stream.
void move_rows(const at::Tensor& wire, const at::Tensor& work, int64_t num_tiles, int64_t num_bytes);

}  // namespace knapformer
