#include "knapformer/core/metrics.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace knapformer {

LoadBalance LoadBalance::of(std::span<const double> load_per_rank) {
  if (load_per_rank.empty()) return {};
  const auto [min, max] = std::minmax_element(load_per_rank.begin(), load_per_rank.end());
  const double sum = std::accumulate(load_per_rank.begin(), load_per_rank.end(), 0.0);
  return {.min = *min, .max = *max, .mean = sum / static_cast<double>(load_per_rank.size())};
}

double LoadBalance::wir() const {
  if (max == 0) return 1;
  return min == 0 ? std::numeric_limits<double>::infinity() : max / min;
}

double LoadBalance::max_over_mean() const { return max == 0 ? 1 : max / mean; }

}  // namespace knapformer
