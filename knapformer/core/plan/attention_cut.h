// How the attention of a sequence is cut that `degree` ranks share: its queries into parts (AttentionShares), and its
// keys into stages, which travel one after another while attention runs on those that have come.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

namespace knapformer {

struct AttentionCut {
  /// With more stages kernels get slow: 8 took 1.37 of one's time, 4 1.06 (alone, H200, 32,768 tokens, 6 heads).
  static constexpr int32_t kMaxStages = 4;

  int32_t degree = 1, num_parts = 1, num_stages = 1;

  /// The part of keys and values in later stages; as large a part of attention runs meanwhile.
  double part_of_later_stages() const { return 1 - 1.0 / num_stages; }
  /// Of attention: each further stage is merged with those before (2 % each, kernels alone on an H200).
  double attention_factor() const { return 1 + 0.02 * (num_stages - 1); }

  /// Of the degree; where it is not in the list, heads alone are cut.
  static AttentionCut of(std::span<const AttentionCut> cuts, int32_t degree) {
    const auto cut = std::ranges::find(cuts, degree, &AttentionCut::degree);
    return cut == cuts.end() ? AttentionCut{.degree = degree} : *cut;
  }
  bool operator==(const AttentionCut&) const = default;
};

}  // namespace knapformer
