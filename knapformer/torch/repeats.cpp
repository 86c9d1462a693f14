#include "knapformer/torch/repeats.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "knapformer/core/error.h"

namespace knapformer {

at::Tensor zeros_to_sum(const at::Tensor& output) {
  return at::zeros(output.sizes(), output.options().dtype(at::toOpMathType(output.scalar_type())));
}

void add_heads(const at::Tensor& sum, const at::Tensor& block, std::span<const int32_t> heads) {
  const at::Tensor values = block.to(sum.scalar_type());
  for (size_t begin = 0; begin < heads.size();) {
    size_t end = begin + 1;
    while (end < heads.size() && heads[end] == heads[end - 1] + 1) ++end;
    const auto count = static_cast<int64_t>(end - begin);
    sum.narrow(1, heads[begin], count).add_(values.narrow(1, static_cast<int64_t>(begin), count));
    begin = end;
  }
}

at::Tensor sum_rows(const at::Tensor& wire_rows, const at::Tensor& puts) {
  const int64_t num_wire_rows = wire_rows.size(0);
  std::vector<int64_t> shape = wire_rows.sizes().vec();
  if (num_wire_rows == 0) {
    shape[0] = puts.size(0);
    return at::zeros(shape, wire_rows.options());
  }
  // The index past the end reads row 0 and is masked, so that no row of zeros need be appended to a copy.
  const at::Tensor places = puts.flatten();
  const at::Tensor absent = places.eq(num_wire_rows);
  shape[0] = puts.size(0);
  shape.insert(shape.begin() + 1, puts.size(1));
  std::vector<int64_t> mask_shape(shape.size(), 1);
  mask_shape[0] = shape[0];
  mask_shape[1] = shape[1];
  return wire_rows.index_select(0, places.masked_fill(absent, 0))
      .to(at::toOpMathType(wire_rows.scalar_type()))
      .view(shape)
      .masked_fill(absent.view(mask_shape), 0)
      .sum(1)
      .to(wire_rows.scalar_type());
}

RepeatedRows::RepeatedRows(const ExchangeRegion& region, const ExchangePart& part) {
  const auto item_bytes = static_cast<int64_t>(part.input.itemsize());
  first_value_.push_back(0);
  for (int32_t peer = 0; peer < region.recv.num_peers(); ++peer) {
    num_rows_.push_back(region.recv.peer_rows(peer));
    const int64_t row_bytes = part.wire_bytes(region.recv, peer, part.output_row_bytes);
    first_value_.push_back(first_value_.back() + num_rows_.back() * (row_bytes / item_bytes));
  }
  values_ = at::empty({first_value_.back()}, part.input.options());
}

RepeatedRows::Block RepeatedRows::block_of(int32_t peer) {
  const auto p = static_cast<size_t>(peer);
  const auto item_bytes = static_cast<int64_t>(values_.itemsize());
  const int64_t num_values = first_value_[p + 1] - first_value_[p];
  return {.data = static_cast<std::byte*>(values_.mutable_data_ptr()) + first_value_[p] * item_bytes,
          .num_rows = num_rows_[p],
          .row_bytes = num_rows_[p] == 0 ? 0 : num_values / num_rows_[p] * item_bytes};
}

void RepeatedRows::sum_into(const ExchangeRegion& region, const ExchangePart& part) const {
  const at::Tensor sum = zeros_to_sum(part.output);
  const auto add_block = [&](int32_t peer) {
    const auto p = static_cast<size_t>(peer);
    if (first_value_[p + 1] == first_value_[p]) return;
    std::vector<int64_t> shape = part.output.sizes().vec();
    shape[0] = num_rows_[p];
    if (region.recv.heads_shared()) shape[1] = -1;
    const at::Tensor block = values_.narrow(0, first_value_[p], first_value_[p + 1] - first_value_[p]).view(shape);
    if (region.recv.heads_shared()) {
      add_heads(sum, block, part.shares->of(peer - region.recv.head_group().first_peer));
      return;
    }
    const at::Tensor values = block.to(sum.scalar_type());
    int64_t next = 0;
    for (const RowRun& run : region.recv.runs_of(peer)) {
      sum.narrow(0, run.first_row, run.num_rows).add_(values.narrow(0, next, run.num_rows));
      next += run.num_rows;
    }
  };
  const int32_t own = region.recv.this_peer();
  add_block(own);
  for (int32_t peer = 0; peer < region.recv.num_peers(); ++peer) {
    if (peer != own) add_block(peer);
  }
  part.output.copy_(sum);
}

}  // namespace knapformer
