// Which heads of a sequence each of the g ranks that share it computes.
//
// Query heads: contiguous shares, in units of the heads that use one key/value head, as even as possible (the first
// shares are larger). With fewer key/value heads than ranks, query heads are split evenly on their own, and a rank gets
// every key/value head that its query heads use: once, if each serves equally many of its query heads; else repeated,
// one per query head. So attention on a rank is always plain grouped-query attention.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace knapformer {

/// For each of `degree` ranks the heads that it gets, in order.
struct HeadShares {
  int32_t num_heads = 0;
  std::vector<int32_t> heads;    // concatenated
  std::vector<int32_t> offsets;  // degree + 1, into heads

  std::span<const int32_t> of(int32_t index_in_group) const;
  /// Whether some head is in several shares (or twice in one): then gradients add up.
  bool repeats() const;
  bool operator==(const HeadShares&) const = default;
};

struct HeadPartition {
  HeadShares query;
  HeadShares key_value;
};

/// Throws ArgumentError where num_kv_heads does not divide num_heads, or a count is below 1.
HeadPartition partition_heads(int64_t num_heads, int64_t num_kv_heads, int32_t degree);

}  // namespace knapformer
