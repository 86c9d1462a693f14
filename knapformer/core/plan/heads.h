// Which heads of a sequence each of the g ranks that share it computes.
//
// Query heads: contiguous shares, in units of the heads that use one key/value head, as even as possible (the first
// shares are larger). With fewer key/value heads than ranks, query heads are split evenly one by one, and a rank gets
// every key/value head that its query heads use: once, if each of these serves equally many of its query heads; else
// once for each query head. So attention on a rank is always plain grouped-query attention.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "knapformer/core/util/ragged.h"

namespace knapformer {

/// The heads that each of `degree` ranks gets, in order.
struct HeadShares {
  int32_t num_heads = 0;
  Ragged<int32_t> heads;

  std::span<const int32_t> of(int32_t index_in_group) const { return heads.of(index_in_group); }
  /// Whether some head is in several shares (or twice in one share): then gradients add up.
  bool has_duplicates() const { return std::ssize(heads.values) != num_heads; }
  bool operator==(const HeadShares&) const = default;
};

struct HeadPartition {
  HeadShares query;
  HeadShares key_value;
};

/// Throws ArgumentError where num_kv_heads does not divide num_heads, or a count is below 1.
HeadPartition partition_heads(int64_t num_heads, int64_t num_kv_heads, int32_t degree);

/// How the ranks of a group divide a sequence's attention: in proportion to the query heads of each, or evenly if the
/// number of heads is not known. Computed once for each degree.
class AttentionShares {
 public:
  /// num_heads 0: not known. num_kv_heads 0: as many as query heads. part and max throw as partition_heads does.
  AttentionShares(int32_t num_heads, int32_t num_kv_heads) : num_heads_(num_heads), num_kv_heads_(num_kv_heads) {}

  /// The part of `whole` on rank `index_in_group` of a group of `degree` ranks.
  double part(double whole, int32_t degree, int32_t index_in_group) const {
    if (is_even(degree)) return whole / degree;
    return whole * heads(degree)[index_in_group] / num_heads_;
  }
  /// The largest share.
  double max(int32_t degree) const;

  /// Whether every rank has the same share.
  bool is_even(int32_t degree) const {
    const int32_t unit = num_kv_heads_ == 0 || num_kv_heads_ < degree ? num_heads_ : num_kv_heads_;
    return unit % degree == 0;
  }

 private:
  const std::vector<int32_t>& heads(int32_t degree) const;

  int32_t num_heads_, num_kv_heads_;
  mutable std::map<int32_t, std::vector<int32_t>> heads_;  // by degree: the query heads of each rank of a group
};

}  // namespace knapformer
