#include "knapformer/core/plan/heads.h"

#include <algorithm>
#include <numeric>

#include "knapformer/core/util/error.h"

namespace knapformer {
namespace {

/// `count` units in `degree` contiguous shares, the first ones larger: offsets.
std::vector<int32_t> even_offsets(int32_t count, int32_t degree) {
  std::vector<int32_t> offsets(static_cast<size_t>(degree) + 1, 0);
  for (int32_t i = 0; i < degree; ++i) {
    offsets[static_cast<size_t>(i) + 1] = offsets[i] + count / degree + (i < count % degree ? 1 : 0);
  }
  return offsets;
}

/// Consecutive shares of all heads, `unit` heads an offset.
HeadShares contiguous(int32_t num_heads, std::vector<int32_t> offsets, int32_t unit) {
  for (int32_t& offset : offsets) offset *= unit;
  HeadShares shares{.num_heads = num_heads,
                    .heads = std::vector<int32_t>(static_cast<size_t>(num_heads)),
                    .offsets = std::move(offsets)};
  std::iota(shares.heads.begin(), shares.heads.end(), 0);
  return shares;
}

/// The key/value heads that query heads [first, last) use, `per_kv` query heads each.
std::vector<int32_t> key_values_of(int32_t first, int32_t last, int32_t per_kv) {
  std::vector<int32_t> of_each;
  for (int32_t head = first; head < last; ++head) of_each.push_back(head / per_kv);
  std::vector<int32_t> once = of_each;
  once.erase(std::unique(once.begin(), once.end()), once.end());
  const bool uniform = std::all_of(once.begin(), once.end(), [&](int32_t kv) {
    return static_cast<size_t>(std::count(of_each.begin(), of_each.end(), kv)) * once.size() == of_each.size();
  });
  return uniform ? once : of_each;
}

}  // namespace

std::span<const int32_t> HeadShares::of(int32_t index_in_group) const {
  const auto i = static_cast<size_t>(index_in_group);
  return std::span(heads).subspan(static_cast<size_t>(offsets[i]), static_cast<size_t>(offsets[i + 1] - offsets[i]));
}

bool HeadShares::has_duplicates() const { return heads.size() != static_cast<size_t>(num_heads); }

HeadPartition partition_heads(int64_t num_heads, int64_t num_kv_heads, int32_t degree) {
  constexpr int64_t kMaxHeads = 1 << 20;
  if (num_heads < 1 || num_heads > kMaxHeads) throw_argument("q", text(num_heads, " heads"), "at least 1 head");
  if (num_kv_heads < 1 || num_heads % num_kv_heads != 0) {
    throw_argument("k", text(num_kv_heads, " heads"), text("a divisor of q's ", num_heads, " heads"));
  }
  const auto heads = static_cast<int32_t>(num_heads), kv_heads = static_cast<int32_t>(num_kv_heads);
  const int32_t per_kv = heads / kv_heads;
  if (kv_heads >= degree) {
    const std::vector<int32_t> offsets = even_offsets(kv_heads, degree);
    return {.query = contiguous(heads, offsets, per_kv), .key_value = contiguous(kv_heads, offsets, 1)};
  }
  HeadPartition partition{.query = contiguous(heads, even_offsets(heads, degree), 1),
                          .key_value = {.num_heads = kv_heads, .heads = {}, .offsets = {0}}};
  for (int32_t i = 0; i < degree; ++i) {
    const auto share = static_cast<size_t>(i);
    const auto used = key_values_of(partition.query.offsets[share], partition.query.offsets[share + 1], per_kv);
    partition.key_value.heads.insert(partition.key_value.heads.end(), used.begin(), used.end());
    partition.key_value.offsets.push_back(static_cast<int32_t>(partition.key_value.heads.size()));
  }
  return partition;
}

const std::vector<int32_t>& AttentionShares::heads(int32_t degree) const {
  std::vector<int32_t>& counts = heads_[degree];
  if (counts.empty()) {
    const HeadPartition shares = partition_heads(num_heads_, num_kv_heads_ == 0 ? num_heads_ : num_kv_heads_, degree);
    for (int32_t i = 0; i < degree; ++i) counts.push_back(static_cast<int32_t>(shares.query.of(i).size()));
  }
  return counts;
}

std::pair<double, double> AttentionShares::extreme(int32_t degree) const {
  const auto [min, max] = std::minmax_element(heads(degree).begin(), heads(degree).end());
  return {static_cast<double>(*min) / num_heads_, static_cast<double>(*max) / num_heads_};
}

}  // namespace knapformer
