// Attention over packed sequences by their masks: what kernels want of these, and the kernel for CPUs.
//
// On accelerators FlexAttention computes it (python/knapformer/attention/masked.py), which skips square blocks
// (kBlockSize) that no query sees. On CPUs queries go to torch's attention with the keys that all of them see; where
// ranges move with the query, halves of the queries with more keys each, and so on. So no pair that the mask leaves out
// is computed but near moving ends, and no call has all scores of a long sequence.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "knapformer/core/plan/mask_rows.h"

namespace knapformer {

class MaskTables {
 public:
  static constexpr int64_t kBlockSize = 128;

  explicit MaskTables(MaskRows rows) : rows_(std::move(rows)) {}

  const MaskRows& rows() const { return rows_; }
  /// For FlexAttention, int32 on a device.
  struct Blocks {
    std::vector<std::pair<at::Tensor, at::Tensor>> bounds;  // of each range, by query: the first key, and the end
    /// Counts and indices of blocks: keys seen in part, whole; then queries, the same.
    std::vector<at::Tensor> lists;
  };
  /// Copied to the device at the first call on its present stream, without a wait.
  const Blocks& blocks_on(at::Device device);
  /// Makes them on the host, so that blocks_on has only to copy them. pinned: for an accelerator. On any thread.
  void make_blocks(bool pinned);

 private:
  MaskRows rows_;
  at::Tensor blocks_;
  std::vector<std::pair<c10::Stream, Blocks>> copies_;
};

/// q (queries, heads, head_dim); k, v (keys, kv heads, ...), on the CPU, kv heads a divisor of heads. Returns (queries,
/// heads, ...), 0 for queries that see no key. Differentiable.
at::Tensor masked_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            std::shared_ptr<const MaskTables> tables);

}  // namespace knapformer
