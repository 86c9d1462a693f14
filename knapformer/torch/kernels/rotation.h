// knapformer::rotate: rotary position embedding (RoPE), as an operation of torch.
//
//   rotate(Tensor x, Tensor turns, bool back) -> Tensor
//   rotate_rows(Tensor(a!) out, Tensor work, int num_blocks) -> ()
//
// The second is a launch of the rotation kernel: `work` is its Rotation, on the host. It is an operation so that a
// device of torch's `privateuse1` can bring its own kernel. On CUDA it is the kernel that NVRTC compiled; on the CPU it
// is a loop, for tests.
//
// On devices without the kernel, on the CPU and where NVRTC cannot be had, rotate takes operations of ATen: three
// launches that move 20 bytes for each number of bfloat16, in place of one launch that moves 4 bytes.
#pragma once

#include <ATen/core/Tensor.h>

#include "knapformer/torch/kernels/kernel_source.h"

namespace knapformer {

const KernelSource& rotation_source();

/// Rotates each pair of features (0, 1), (2, 3), ... of each head by the angle that its token has for the pair; by its
/// negative with `back`.
///
/// x (tokens, heads, head_dim) of any floating type; turns (tokens, 1, head_dim / 2, 2), float32 or float64: cosine and
/// sine. Computed in the type of turns, returned dense in that of x. Differentiable in x any number of times, forward
/// and backward. Throws c10::ValueError where they do not fit each other.
at::Tensor rotate(const at::Tensor& x, const at::Tensor& turns, bool back = false);

/// The same by rotate_rows, on a device that has the kernel. This is what rotate() does there, below autograd.
at::Tensor rotate_by_kernel(const at::Tensor& x, const at::Tensor& turns, bool back);

}  // namespace knapformer
