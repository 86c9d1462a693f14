// How even a load is over ranks.
#pragma once

#include <span>

namespace knapformer {

struct LoadBalance {
  double min = 0;
  double max = 0;
  double mean = 0;

  static LoadBalance of(std::span<const double> load_per_rank);

  /// Workload imbalance ratio: the highest over the lowest. Infinity where a rank has none and another has some; 1
  /// where none has any.
  double wir() const;
  /// The highest over the mean: how much longer the step takes than with perfect balance. 1 where none has any.
  double max_over_mean() const;
};

}  // namespace knapformer
