#include "knapformer/core/plan/load_balance.h"

#include <algorithm>
#include <cmath>

#include "knapformer/core/util/infinity.h"

namespace knapformer {
namespace {

/// Rounds once, except for contrived loads: so the same loads in another order have the same mean. (Neumaier, 1974.)
double compensated_sum(std::span<const double> values) {
  double sum = 0, lost = 0;
  for (const double value : values) {
    const double next = sum + value;
    lost += std::abs(sum) >= std::abs(value) ? (sum - next) + value : (value - next) + sum;
    sum = next;
  }
  return sum + lost;
}

}  // namespace

LoadBalance LoadBalance::of(std::span<const double> load_per_rank) {
  if (load_per_rank.empty()) return {};
  const auto [min, max] = std::minmax_element(load_per_rank.begin(), load_per_rank.end());
  return {.min = *min, .max = *max, .mean = compensated_sum(load_per_rank) / static_cast<double>(load_per_rank.size())};
}

double LoadBalance::wir() const {
  if (max == 0) return 1;
  return min == 0 ? kInfinity : max / min;
}

double LoadBalance::max_over_mean() const { return max == 0 ? 1 : max / mean; }

}  // namespace knapformer
