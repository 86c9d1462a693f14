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

#include "knapformer/core/plan/attention_cut.h"
#include "knapformer/core/util/ragged.h"

namespace knapformer {

/// The heads that each of `degree` ranks gets, in order.
struct HeadShares {
  int32_t num_heads = 0;
  Ragged<int32_t> heads;

  std::span<const int32_t> of(int32_t index_in_group) const { return heads.of(index_in_group); }
  /// Whether some head is in several shares (or twice in one share): then gradients add up.
  bool has_duplicates() const { return std::ssize(heads.values) != num_heads; }
};

struct HeadPartition {
  HeadShares query;
  HeadShares key_value;
};

/// How the ranks of a group share a sequence's attention, seen from one of them.
struct HeadSharing {
  int32_t degree = 1;
  int32_t index_in_group = 0;  // which share of the heads and which part of the queries this rank computes
  int32_t query_parts = 1;     // into how many parts queries are cut; 1: each rank of the group has all of them

  int32_t head_parts() const { return degree / query_parts; }
};

/// Throws ArgumentError where num_kv_heads does not divide num_heads, or a count is below 1.
HeadPartition partition_heads(int64_t num_heads, int64_t num_kv_heads, int32_t degree);

/// How the ranks of a group divide a sequence's attention. Its heads are cut into u parts and its queries into r, with
/// u r ranks in the group: rank j u + i attends with queries of part j and heads of part i to all keys of these heads.
/// r = 1 is Ulysses. Queries are cut evenly, heads as partition_heads does; evenly, too, if their number is not known.
class AttentionShares {
 public:
  /// num_heads 0: not known. num_kv_heads 0: as many as query heads. cuts: of the degrees with r > 1, where r divides
  /// the degree. What counts heads throws as partition_heads does.
  AttentionShares(int32_t num_heads, int32_t num_kv_heads, std::span<const AttentionCut> cuts = {});

  int32_t query_parts(int32_t degree) const { return AttentionCut::of(cuts_, degree).num_parts; }
  int32_t head_parts(int32_t degree) const { return degree / query_parts(degree); }

  /// The part of `whole` on rank `index_in_group` of a group of `degree` ranks.
  double part(double whole, int32_t degree, int32_t index_in_group) const;
  /// The largest share.
  double max(int32_t degree) const;
  /// Whether every rank has the same share.
  bool is_even(int32_t degree) const;

  /// The heads of a row of queries that a rank gets, those of a row of keys (or of values), and all of a row of
  /// queries. Unknown heads count as one for each part.
  int32_t query_heads(int32_t degree, int32_t index_in_group) const {
    return count(degree, index_in_group, &HeadPartition::query);
  }
  int32_t key_heads(int32_t degree, int32_t index_in_group) const {
    return count(degree, index_in_group, &HeadPartition::key_value);
  }
  int32_t num_heads(int32_t degree) const { return num_heads_ == 0 ? head_parts(degree) : num_heads_; }

 private:
  int32_t count(int32_t degree, int32_t index_in_group, HeadShares HeadPartition::*heads) const;

  int32_t num_heads_, num_kv_heads_;
  std::vector<AttentionCut> cuts_;
  mutable std::map<int32_t, HeadPartition> partitions_;  // by head parts
};

}  // namespace knapformer
