#include "knapformer/torch/exchange/duplicates.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "knapformer/core/util/error.h"

namespace knapformer {

void add_block(const SegmentEnd& recv, Slot& slot, int32_t peer, const at::Tensor& columns) {
  if (!slot.sum.defined()) {
    slot.sum = at::zeros(slot.output.sizes(), slot.output.options().dtype(at::toOpMathType(slot.output.scalar_type())));
  }
  if (columns.numel() == 0) return;
  std::vector<int64_t> shape = slot.output.sizes().vec();
  shape[0] = columns.size(0);
  if (recv.heads_shared()) shape[1] = -1;
  // Copied even where it is contiguous: a view as another dtype must begin at a multiple of its element size.
  const at::Tensor values = columns.clone(at::MemoryFormat::Contiguous)
                                .view(slot.output.scalar_type())
                                .view(shape)
                                .to(slot.sum.scalar_type());
  int64_t next = 0;
  if (!recv.heads_shared()) {
    for (const RowRun& run : recv.runs_of(peer)) {
      slot.sum.narrow(0, run.first_row, run.num_rows).add_(values.narrow(0, next, run.num_rows));
      next += run.num_rows;
    }
    return;
  }
  recv.for_each_column_run(slot, peer, [&](ColumnRun run) {
    const int64_t first_head = run.first_byte / slot.head_bytes, num_heads = run.num_bytes / slot.head_bytes;
    slot.sum.narrow(1, first_head, num_heads).add_(values.narrow(1, next, num_heads));
    next += num_heads;
  });
}

at::Tensor sum_rows(const at::Tensor& wire_rows, const at::Tensor& scatter_index) {
  const int64_t num_wire_rows = wire_rows.size(0);
  std::vector<int64_t> shape = wire_rows.sizes().vec();
  shape[0] = scatter_index.size(0);
  if (num_wire_rows == 0) return at::zeros(shape, wire_rows.options());
  // The index past the end reads row 0 and is masked, so that no row of zeros need be appended to a copy.
  const at::Tensor places = scatter_index.flatten();
  const at::Tensor absent = places.eq(num_wire_rows);
  shape.insert(shape.begin() + 1, scatter_index.size(1));
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

}  // namespace knapformer
