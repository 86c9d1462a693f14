// How evenly a load is spread over ranks.
#pragma once

#include <span>

namespace knapformer {

struct LoadBalance {
  double min = 0;
  double max = 0;
  double mean = 0;

  static LoadBalance of(std::span<const double> load_per_rank);

  /// Workload imbalance ratio: the highest load over the lowest. Infinity if one rank has no load and another has some;
  /// 1 if no rank has any.
  double wir() const;
  /// The highest load over the mean: how much longer the step takes than with perfect balance. 1 if no rank has any.
  double max_over_mean() const;
};

}  // namespace knapformer
