// The rotation kernel: rotary position embedding in one pass over memory, each number read once and written once.
//
// Like the packing kernel, it is one source for the CPU, where tests run it thread by thread, and for NVRTC.
//
// A thread rotates one pair of features of up to kHeads heads of a token, so that it reads their angle once. Threads
// beside each other take pairs beside each other.
#pragma once

#include "knapformer/torch/kernels/numbers.h"

namespace knapformer::rotation {

using namespace kernels;

constexpr int kThreads = 256;
constexpr int kHeads = 8;

/// Both x and the result are (tokens, heads, pairs). x may lie in wider rows, the result is dense.
struct Rotation {
  Address from = 0, to = 0;
  Address turns = 0;                        // (tokens, pairs) of cosine and sine
  Index token_stride = 0, head_stride = 0;  // of x, bytes
  Index num_tokens = 0;
  int num_heads = 0, num_pairs = 0;
  Item item = Item::kFloat;
  bool in_double = false;  // the turns are double, and the computation, too
  bool back = false;       // by the negative angle

  KNAPFORMER_KERNEL int num_groups() const { return (num_heads + kHeads - 1) / kHeads; }
  KNAPFORMER_KERNEL Index num_blocks() const {
    return (num_tokens * num_groups() * num_pairs + kThreads - 1) / kThreads;
  }
};

template <class Items, class Turns>
KNAPFORMER_KERNEL void rotate_heads(const Rotation& r, Index thread) {
  using Number = typename Turns::Total;
  using Total = typename Items::Total;
  const Index row = quotient(thread, r.num_pairs), pair = thread - row * r.num_pairs;
  const Index token = quotient(row, r.num_groups());
  const int first_head = static_cast<int>(row - token * r.num_groups()) * kHeads;
  if (token >= r.num_tokens) return;
  const int num_heads = r.num_heads - first_head;  // of this thread, if they are fewer than kHeads
  Total a[kHeads] = {}, b[kHeads] = {};
  Address from = r.from + token * r.token_stride + first_head * r.head_stride + pair * 2 * Items::kBytes;
  for (int k = 0; k < kHeads; ++k) {  // all reads are under way before the first write waits for its data
    if (k < num_heads) Items::read_pair(from, a[k], b[k]);
    from += r.head_stride;
  }
  Number cos, sin;
  Turns::read_pair(r.turns + (token * r.num_pairs + pair) * 2 * Turns::kBytes, cos, sin);
  if (r.back) sin = -sin;
  Address to = r.to + ((token * r.num_heads + first_head) * r.num_pairs + pair) * 2 * Items::kBytes;
  for (int k = 0; k < kHeads; ++k) {
    const Number x = static_cast<Number>(a[k]), y = static_cast<Number>(b[k]);
    const auto first = static_cast<Total>(x * cos - y * sin), second = static_cast<Total>(x * sin + y * cos);
    if (k < num_heads) Items::write_pair(to, first, second);
    to += static_cast<Address>(r.num_pairs) * 2 * Items::kBytes;
  }
}

template <class Items>
KNAPFORMER_KERNEL void rotate_items(const Rotation& r, Index thread) {
  r.in_double ? rotate_heads<Items, DoubleItems>(r, thread) : rotate_heads<Items, FloatItems>(r, thread);
}

/// What one thread does, of num_blocks() x kThreads.
KNAPFORMER_KERNEL void run_thread(const Rotation& r, Index thread) {
  switch (r.item) {
    case Item::kFloat:
      return rotate_items<FloatItems>(r, thread);
    case Item::kDouble:
      return rotate_items<DoubleItems>(r, thread);
    case Item::kHalf:
      return rotate_items<HalfItems>(r, thread);
    case Item::kBFloat16:
      return rotate_items<BFloat16Items>(r, thread);
  }
}

}  // namespace knapformer::rotation

#if defined(__CUDACC__)
extern "C" __global__ void __launch_bounds__(knapformer::rotation::kThreads)
    knapformer_rotate(const __grid_constant__ knapformer::rotation::Rotation rotation) {
  using knapformer::rotation::kThreads;
  run_thread(rotation, static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x);
}
#endif
