// Reduction of duplicates: a row or head that went to several peers gets a gradient from each, and they add up.
//
// Sums are taken in float32 for half types, in one fixed order (this rank's own, then by peer), so that a run gives the
// same bits each time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "knapformer/torch/exchange/call.h"

namespace knapformer {

/// Adds what arrived from `peer` for a slot to the slot's sum, which begins as zeros. columns: (rows from the peer, the
/// peer's bytes of a row as words of any width).
void add_block(const SegmentEnd& recv, Slot& slot, int32_t peer, const at::Tensor& columns);

/// For whole ends, adds the rows of all peers at once: row i of the result is the sum of the rows of `wire_rows` that
/// scatter_index[i] names; an index one past the end adds nothing. Few launches, on any device.
at::Tensor sum_rows(const at::Tensor& wire_rows, const at::Tensor& scatter_index);

}  // namespace knapformer
