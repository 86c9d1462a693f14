// Copies of rows by ATen's index operations, on any device; and sums of duplicates.
//
// Bytes are moved as the widest words that divide the rows and the places where they begin.
#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/zeros.h>

#include <numeric>

#include "knapformer/torch/exchange/engine.h"

namespace knapformer {
namespace {

/// A dtype of that many bytes, by which words are copied.
at::ScalarType dtype_of_word(int64_t num_bytes) {
  switch (num_bytes) {
    case 16:
      return at::kComplexDouble;
    case 8:
      return at::kLong;
    case 4:
      return at::kInt;
    case 2:
      return at::kShort;
    default:
      return at::kByte;
  }
}

int64_t offset_of(const Rows& rows) {
  return rows.first - static_cast<const std::byte*>(rows.tensor->const_data_ptr());
}

/// The widest word by which the rows can be moved.
int64_t word_of(const Rows& rows) {
  // Not every device has complex numbers of 16 bytes.
  const int64_t widest = rows.tensor->is_mps() || rows.tensor->is_xpu() ? 8 : kMaxWordBytes;
  const int64_t first = rows.tensor->storage_offset() * static_cast<int64_t>(rows.tensor->itemsize()) + offset_of(rows);
  const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(rows.first));
  return std::gcd(std::gcd(widest, rows.stride), std::gcd(first, address));
}

/// (num_rows, words)
at::Tensor words_of(const Rows& rows, int64_t num_rows, int64_t width, int64_t word) {
  const at::Tensor& tensor = *rows.tensor;
  const auto item = static_cast<int64_t>(tensor.itemsize());
  if (rows.end != nullptr) num_rows = tensor.size(0);
  return tensor
      .as_strided({num_rows, width / item}, {rows.stride / item, 1}, tensor.storage_offset() + offset_of(rows) / item)
      .view(dtype_of_word(word));
}

}  // namespace

void copy_by_aten(const RowCopies& copies) {
  for (const auto& [from, to, width, num_rows] : copies) {
    const int64_t word = std::gcd(width, std::gcd(word_of(from), word_of(to)));
    at::Tensor source = words_of(from, num_rows, width, word), target = words_of(to, num_rows, width, word);
    if (to.end == nullptr && from.end != nullptr) {
      at::index_select_out(target, source, 0, from.end->index_of(from.peer));
    } else if (to.end == nullptr) {
      target.copy_(source);
    } else {
      if (from.end != nullptr) source = source.index_select(0, from.end->index_of(from.peer));
      target.index_copy_(0, to.end->index_of(to.peer), source);
    }
  }
}

void add_block(ExchangeCall& call, const WireBlock& block) {
  const SegmentEnd& recv = *block.end;
  Slot& slot = call.slot_of(block);
  if (!slot.sum.defined()) {
    slot.sum = at::zeros(slot.output.sizes(), slot.output.options().dtype(at::toOpMathType(slot.output.scalar_type())));
  }
  if (block.row_bytes == 0 || block.num_rows == 0) return;
  std::vector<int64_t> shape = slot.output.sizes().vec();
  shape[0] = block.num_rows;
  if (recv.heads_shared()) shape[1] = -1;
  const at::Tensor values = call.wire()
                                .narrow(0, block.first_byte, block.num_rows * block.row_bytes)
                                .view(slot.output.scalar_type())
                                .view(shape)
                                .to(slot.sum.scalar_type());
  int64_t next = 0;
  if (recv.heads_shared()) {
    recv.for_each_column_run(slot, block.peer, [&](ColumnRun run) {
      const int64_t first_head = run.first_byte / slot.head_bytes, num_heads = run.num_bytes / slot.head_bytes;
      slot.sum.narrow(1, first_head, num_heads).add_(values.narrow(1, next, num_heads));
      next += num_heads;
    });
  } else if (call.engine() != ExchangeEngine::kCpu) {
    slot.sum.index_add_(0, recv.index_of(block.peer), values);  // no row is twice in the index
  } else {
    for (const RowRun& run : recv.runs_of(block.peer)) {
      slot.sum.narrow(0, run.first_row, run.num_rows).add_(values.narrow(0, next, run.num_rows));
      next += run.num_rows;
    }
  }
}

}  // namespace knapformer
