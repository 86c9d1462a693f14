#include "knapformer/core/plan/attention_shares.h"

#include <algorithm>

#include "knapformer/core/util/error.h"

namespace knapformer {
namespace {

/// Splits all heads into `degree` consecutive shares of whole units; the first shares are larger.
HeadShares contiguous(int32_t num_heads, int32_t num_units, int32_t degree) {
  HeadShares shares{.num_heads = num_heads, .heads = {}};
  for (int32_t i = 0, head = 0; i < degree; ++i) {
    const int32_t units = num_units / degree + (i < num_units % degree ? 1 : 0);
    for (const int32_t end = head + units * (num_heads / num_units); head < end; ++head)
      shares.heads.values.push_back(head);
    shares.heads.end_list();
  }
  return shares;
}

/// The key/value heads that these query heads use. Each serves `per_kv` query heads.
std::vector<int32_t> key_values_of(std::span<const int32_t> query_heads, int32_t per_kv) {
  std::vector<int32_t> of_each;
  for (const int32_t head : query_heads) of_each.push_back(head / per_kv);
  std::vector<int32_t> once = of_each;
  once.erase(std::unique(once.begin(), once.end()), once.end());
  const bool uniform = std::all_of(once.begin(), once.end(), [&](int32_t kv) {
    return static_cast<size_t>(std::count(of_each.begin(), of_each.end(), kv)) * once.size() == of_each.size();
  });
  return uniform ? once : of_each;
}

}  // namespace

HeadPartition partition_heads(int64_t num_heads, int64_t num_kv_heads, int32_t degree) {
  constexpr int64_t kMaxHeads = 1 << 20;
  if (num_heads < 1 || num_heads > kMaxHeads) throw_argument("q", text(num_heads, " heads"), "at least 1 head");
  if (num_kv_heads < 1 || num_heads % num_kv_heads != 0) {
    throw_argument("k", text(num_kv_heads, " heads"), text("a divisor of q's ", num_heads, " heads"));
  }
  const auto heads = static_cast<int32_t>(num_heads), kv_heads = static_cast<int32_t>(num_kv_heads);
  const int32_t per_kv = heads / kv_heads;
  if (kv_heads >= degree)
    return {.query = contiguous(heads, kv_heads, degree), .key_value = contiguous(kv_heads, kv_heads, degree)};
  HeadPartition partition{.query = contiguous(heads, heads, degree), .key_value = {.num_heads = kv_heads, .heads = {}}};
  for (int32_t i = 0; i < degree; ++i) {
    const std::vector<int32_t> used = key_values_of(partition.query.of(i), per_kv);
    Ragged<int32_t>& key_values = partition.key_value.heads;
    key_values.values.insert(key_values.values.end(), used.begin(), used.end());
    key_values.end_list();
  }
  return partition;
}

AttentionShares::AttentionShares(int32_t num_heads, int32_t num_kv_heads, std::span<const AttentionCut> cuts)
    : num_heads_(num_heads),
      num_kv_heads_(num_kv_heads == 0 ? num_heads : num_kv_heads),
      cuts_(cuts.begin(), cuts.end()) {}

bool AttentionShares::is_even(int32_t degree) const {
  const int32_t parts = head_parts(degree);
  return (num_kv_heads_ < parts ? num_heads_ : num_kv_heads_) % parts == 0;
}

double AttentionShares::part(double whole, int32_t degree, int32_t index_in_group) const {
  if (is_even(degree)) return whole / degree;
  return whole * query_heads(degree, index_in_group) / num_heads(degree) / query_parts(degree);
}

double AttentionShares::max(int32_t degree) const {
  if (is_even(degree)) return 1.0 / degree;
  int32_t most = 0;
  for (int32_t i = 0; i < head_parts(degree); ++i) most = std::max(most, query_heads(degree, i));
  return static_cast<double>(most) / num_heads(degree) / query_parts(degree);
}

int32_t AttentionShares::count(int32_t degree, int32_t index_in_group, HeadShares HeadPartition::*heads) const {
  const int32_t parts = head_parts(degree);
  HeadPartition& known = partitions_[parts];  // without heads until it is made
  if (known.query.num_heads == 0)
    known = partition_heads(num_heads(degree), num_heads_ == 0 ? parts : num_kv_heads_, parts);
  return static_cast<int32_t>((known.*heads).of(index_in_group % parts).size());
}

}  // namespace knapformer
