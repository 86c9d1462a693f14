// What kernels want of the masks of packed sequences: the ranges of keys that each query sees, and their blocks.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

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
  at::Tensor blocks_;           // all of them on the host, one after another
  std::vector<int64_t> sizes_;  // of each
  std::vector<std::pair<c10::Stream, Blocks>> copies_;
};

}  // namespace knapformer
