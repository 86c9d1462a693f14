// Large CPU tensors in memory that exchanges have used before.
//
// A fresh large buffer costs a page fault for every 4 KiB when it is first written, which takes longer than the copy
// into it. Exchanges ask for about the sizes of the step before, so freed buffers are kept for them, up to a limit.
// Accelerators need none of this: their caching allocators do it.
#pragma once

#include <ATen/core/Tensor.h>

namespace knapformer {

/// As at::empty; on the CPU the memory goes back when the last tensor on it is gone. Thread-safe.
at::Tensor empty_recycled(at::IntArrayRef sizes, const at::TensorOptions& options);

/// Bytes that are kept for later, at most kMaxKeptBytes. For tests.
size_t recycled_bytes_kept();

constexpr size_t kMaxKeptBytes = size_t{512} << 20;

}  // namespace knapformer
