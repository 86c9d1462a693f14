// Exchanges of attention: what each rank of a group that shares sequences sends, to its node and beyond, and how long
// the links take.
#pragma once

#include <algorithm>
#include <cstdint>

#include "knapformer/core/plan/plan_input.h"

namespace knapformer {

/// What a rank sends, by destination. Both links work at the same time.
struct Traffic {
  double inside = 0;   // to ranks of its node
  double between = 0;  // to ranks of other nodes

  double total() const { return inside + between; }
  double slower() const { return std::max(inside, between); }  // of seconds
  Traffic operator*(double by) const { return {inside * by, between * by}; }
  Traffic operator+(const Traffic& other) const { return {inside + other.inside, between + other.between}; }
  Traffic operator-(const Traffic& other) const { return *this + other * -1; }
  /// The time to send this many bytes: that of the slower link, with its latency.
  double seconds(const Cluster& cluster) const;
};

/// What a rank sends of a row of q, and of one of k (or of v), in widths of the model.
struct SentColumns {
  Traffic query, key;
};
/// To the other ranks of its group that compute this part of the queries. A row of q goes to those of its own part, and
/// one of k and v to those of every part that sees it.
SentColumns sent_columns(const Cluster& cluster, const AttentionShares& shares, Rank rank, Rank first_rank,
                         int32_t degree, int32_t query_part);

/// What a rank sends for each token of a shared sequence: before attention (q, k and v) and after it (the output), in
/// widths of the model. Assumes that each part of the queries lies where it is computed, and sees all keys.
struct SentRows {
  Traffic before, after;

  Traffic sum() const { return before + after; }
  /// Of k and v alone: q's rows go where the output's come from.
  Traffic keys() const { return before - after; }
};
/// The minimum and the maximum over the ranks of the group, link by link.
struct SentRange {
  SentRows min, max;
};
SentRange sent_range(const Cluster& cluster, const AttentionShares& shares, Rank first_rank, int32_t degree);

/// Bytes of a row as wide as the model.
inline double row_bytes(const PlanInput& input) {
  return static_cast<double>(input.d_model) * input.model.element_size;
}
/// Seconds in which a block's exchanges, in all passes, send `columns`, in widths of the model, by link.
Traffic exchange_s(const PlanInput& input, const Traffic& columns);

}  // namespace knapformer
