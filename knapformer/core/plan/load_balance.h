// How evenly a load is spread over ranks.
#pragma once

#include <algorithm>
#include <span>

#include "knapformer/core/util/error.h"

namespace knapformer {

struct LoadBalance {
  double min = 0;
  double max = 0;
  double mean = 0;

  static LoadBalance of(std::span<const double> load_per_rank) {
    if (load_per_rank.empty()) return {};
    const auto [min, max] = std::ranges::minmax(load_per_rank);
    // The sum rounds once, except for contrived loads: so the same loads in another order have the same mean.
    // (Neumaier, 1974.)
    double sum = 0, lost = 0;
    for (const double load : load_per_rank) {
      const double next = sum + load;
      lost += sum >= load ? (sum - next) + load : (load - next) + sum;
      sum = next;
    }
    return {.min = min, .max = max, .mean = (sum + lost) / static_cast<double>(load_per_rank.size())};
  }

  /// Workload imbalance ratio: the highest load over the lowest. Infinity if one rank has no load and another has some;
  /// 1 if no rank has any.
  double wir() const {
    if (max == 0) return 1;
    return min == 0 ? kInfinity : max / min;
  }
  /// The highest load over the mean: how much longer the step takes than with perfect balance. 1 if no rank has any.
  double max_over_mean() const { return max == 0 ? 1 : max / mean; }
};

}  // namespace knapformer
