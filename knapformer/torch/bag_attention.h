// Attention over the ranks of a bag: what is whole here stays, what is shared travels by Ulysses.
//
//   rows of this rank   | whole here (degree 1) | shared by 2 | shared by 4 |   all heads
//                             |                      `------------'
//                             |                     one all-to-all, in flight while what is whole here attends
//                           attend                        |
//                             |                   attend      attend            whole sequences, heads / 2, heads / 4
//                             |                      `------------'
//                             |                     one all-to-all
//   rows of this rank   | whole here            | shared by 2 | shared by 4 |   all heads
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <span>
#include <vector>

#include "knapformer/core/exchange_table.h"
#include "knapformer/torch/exchange.h"

namespace knapformer {

/// (q, k, v, seq_lens) -> o, over packed sequences. q: (tokens, heads, head_dim); k, v: (tokens, kv heads, ...);
/// seq_lens: int32 CPU; o: (tokens, heads, ...).
using Attend = std::function<at::Tensor(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                        const at::Tensor& seq_lens)>;

/// In the exchange before attention.
HeadSharing sharing_of(const AttentionLevel& level);

/// This rank's share, where sequences of this level are whole.
int64_t num_query_heads_of(const AttentionLevel& level, HeadCounts heads);

/// A step's attention on one rank.
struct BagAttention {
  const AttentionTables& tables;
  std::span<const at::Tensor> seq_lens;         // of each level: int32 CPU
  std::span<const TableTensors> shared_levels;  // of each level of several ranks
  Channel* channel;                             // of the bag; null where no level has several ranks
  HeadCounts heads;

  /// q: (rows of this rank, heads, head_dim); k, v: (rows, kv heads, ...). Returns (rows, heads, ...). Collective over
  /// the bag: at most one all-to-all before attention and one after it, forward and backward each. `attend` is called
  /// once for each level that has tokens here; on a rank without any, once without tokens.
  at::Tensor run(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Attend& attend) const;
};

/// `o`, and a recomputation of it (activation checkpointing) comes this far. Torch ends one by an exception once it has
/// all that the forward pass saved: that would be inside `attend`, or on a rank where that saves nothing before an
/// exchange that its peers repeat.
at::Tensor repeated_whole(const at::Tensor& o);

}  // namespace knapformer
