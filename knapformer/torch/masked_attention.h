// Attention over packed sequences by their masks, on CPUs; on accelerators FlexAttention computes it
// (python/knapformer/attention/masked.py), which skips square blocks that no query sees.
//
// Queries go to torch's attention with the keys that all of them see; where ranges move with the query, halves of the
// queries with more keys each, and so on. So no pair that the mask leaves out is computed but near moving ends, and no
// call has all scores of a long sequence.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "knapformer/torch/mask_tables.h"

namespace knapformer {

/// q (queries, heads, head_dim); k, v (keys, kv heads, ...), on the CPU, kv heads a divisor of heads. Returns (queries,
/// heads, ...), 0 for queries that see no key. Differentiable.
at::Tensor masked_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            std::shared_ptr<const MaskTables> tables);

}  // namespace knapformer
