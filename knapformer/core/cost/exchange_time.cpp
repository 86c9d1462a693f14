#include "knapformer/core/cost/exchange_time.h"

namespace knapformer {

double Traffic::seconds(const Cluster& cluster) const {
  const double inside_s = inside > 0 ? cluster.node_latency_s + inside / cluster.node_bytes_per_s : 0;
  const double between_s = between > 0 ? cluster.network_latency_s + between / cluster.network_bytes_per_s : 0;
  return std::max(inside_s, between_s);
}

SentColumns sent_columns(const Cluster& cluster, const AttentionShares& shares, Rank rank, Rank first_rank,
                         int32_t degree, int32_t query_part) {
  Traffic query, key;  // heads
  const auto part_of_all = [&](const Traffic& heads) {
    return Traffic{heads.inside / shares.num_heads(degree), heads.between / shares.num_heads(degree)};
  };
  const int32_t num_parts = shares.head_parts(degree);
  for (int32_t i = query_part * num_parts; i < (query_part + 1) * num_parts; ++i) {
    const Rank to(first_rank.value + i);
    if (to == rank) continue;
    const auto link = cluster.same_node(rank, to) ? &Traffic::inside : &Traffic::between;
    query.*link += shares.query_heads(degree, i);
    key.*link += shares.key_heads(degree, i);
  }
  return {.query = part_of_all(query), .key = part_of_all(key)};
}

SentRange sent_range(const Cluster& cluster, const AttentionShares& shares, Rank first_rank, int32_t degree) {
  SentRange range;
  const auto widen = [](SentRange& to, const SentRows& rows, Traffic SentRows::*when, double Traffic::*link) {
    to.min.*when.*link = std::min(to.min.*when.*link, rows.*when.*link);
    to.max.*when.*link = std::max(to.max.*when.*link, rows.*when.*link);
  };
  // Ranks of a group that is even and inside a node all send the same.
  const bool alike = shares.is_even(degree) && cluster.same_node(first_rank, Rank(first_rank.value + degree - 1));
  for (int32_t i = 0; i < (alike ? 1 : degree); ++i) {
    SentRows rows;
    for (int32_t part = 0; part < shares.query_parts(degree); ++part) {
      const SentColumns sent = sent_columns(cluster, shares, Rank(first_rank.value + i), first_rank, degree, part);
      if (part == i / shares.head_parts(degree)) rows.after = sent.query;
      rows.before = rows.before + sent.key * 2;
    }
    rows.before = rows.before + rows.after;
    if (i == 0) range = {.min = rows, .max = rows};
    for (const auto when : {&SentRows::before, &SentRows::after}) {
      widen(range, rows, when, &Traffic::inside);
      widen(range, rows, when, &Traffic::between);
    }
  }
  return range;
}

Traffic exchange_s(const PlanInput& input, const Traffic& columns) {
  const double bytes = row_bytes(input) * input.model.passes().exchanges();
  return {.inside = columns.inside * bytes / input.cluster.node_bytes_per_s,
          .between = columns.between * bytes / input.cluster.network_bytes_per_s};
}

}  // namespace knapformer
