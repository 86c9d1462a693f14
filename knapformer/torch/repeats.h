// Where a row or head is on the wire several times, and so belongs to several peers: backward, its gradients add up.
//
// Sums are taken in float32 for half types, in one fixed order (this rank's own, then by peer), so that a run repeats
// bit for bit.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "knapformer/torch/exchange_call.h"

namespace knapformer {

/// All that arrives for one output that sums, kept beside it until the sum is taken. CPU.
class RepeatedRows {
 public:
  struct Block {
    std::byte* data = nullptr;
    int64_t num_rows = 0;
    int64_t row_bytes = 0;
  };

  RepeatedRows() = default;
  RepeatedRows(const ExchangeRegion& region, const ExchangePart& part);

  /// Where the rows from `peer` go, dense.
  Block block_of(int32_t peer);
  void sum_into(const ExchangeRegion& region, const ExchangePart& part) const;

 private:
  at::Tensor values_;                 // flat, blocks in peer order
  std::vector<int64_t> first_value_;  // num_peers + 1, into values_
  std::vector<int64_t> num_rows_;
};

/// An accumulator of zeros for `output`.
at::Tensor zeros_to_sum(const at::Tensor& output);

/// Adds `block` (rows, heads.size(), ...) to the heads of `sum` (rows, num_heads, ...) that `heads` names; one may be
/// named twice.
void add_heads(const at::Tensor& sum, const at::Tensor& block, std::span<const int32_t> heads);

/// Row i of the result is the sum of the rows of `wire_rows` that puts[i] names; an index one past the end adds
/// nothing. puts: (rows, max_repeats). Few launches, on any device.
at::Tensor sum_rows(const at::Tensor& wire_rows, const at::Tensor& puts);

}  // namespace knapformer
