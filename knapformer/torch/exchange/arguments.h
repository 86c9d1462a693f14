// The arguments of an exchange beside its tensors: one struct, from the C++ functions of exchange.h through the
// dispatcher to the resolved call (exchange_buffer.h). Autograd keeps it for the backward.
//
// Tensors travel in *segments*: a segment is one exchange table and the tensors that travel by it. All segments of an
// exchange share one all-to-all of bytes, so tensors of any dtype travel together and arrive bit for bit.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "knapformer/core/plan/attention_shares.h"
#include "knapformer/torch/comm/comm_group.h"
#include "knapformer/torch/exchange/table_tensors.h"

namespace knapformer {

/// Which heads of a tensor meet a peer at a shared end. A tensor with a role is (rows, heads, ...).
enum class HeadRole : int64_t { kNone, kQuery, kKey, kValue };

/// Heads of the whole model; 0 where no tensor has a role.
struct HeadCounts {
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
};

struct SegmentArguments {
  PackedTable table;
  std::vector<HeadRole> roles;  // one for each of its tensors
  HeadSharing sharing;          // at the end of which the table says so (PackedEnd::heads_shared)
};

using Tensors = std::vector<at::Tensor>;

/// Tensors that methods take are the exchange's, segment by segment.
struct ExchangeArguments {
  std::vector<SegmentArguments> segments = {};
  HeadCounts heads = {};
  /// For each tensor, whether its gradient travels. Empty in no_grad mode.
  std::vector<bool> differentiable = {};
  std::shared_ptr<CommGroup> group = {};
  std::string call;                     // for messages, as the names of the tensors
  std::vector<std::string> names = {};  // one for each tensor, or none

  /// Adds a segment of so many tensors, without heads. A segment without tensors is left out.
  void add(PackedTable table, size_t num_tensors);

  /// "route(x,features[0])"
  std::string label() const;

  /// The exchange of the gradients, with the ends swapped: of the tensors whose gradient travels, and the segments with
  /// such tensors.
  ExchangeArguments inverse() const;
  /// For a level of attention without rows on this rank: what requires a gradient in another level (q, k or v) does so
  /// in this one on the peers, too.
  void follow_other_levels(Tensors& tensors) const;

  /// What all ranks must agree on.
  Fingerprint fingerprint(at::TensorList tensors) const;
};

/// The partition of the heads into parts, which ranks share; empty where no tensor has a role. Made once for each.
std::shared_ptr<const HeadPartition> head_partition(HeadCounts heads, int32_t num_parts);

}  // namespace knapformer
