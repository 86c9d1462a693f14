// Trades between the bins of a packed step: they lower what stands above the levels.
#pragma once

#include <cstdint>
#include <span>

#include "knapformer/core/planners/packed_bins.h"

namespace knapformer {

struct TradeLimits {
  int64_t num_trials = 0;    // of trades, about
  double good_enough_s = 0;  // stops where the times of the micro-batches add up to this
  /// Where no trade helps, it starts again so many times, from the best so far with a few sequences swapped at random.
  int32_t num_kicks = 0;
};

/// The bin furthest above the level of its micro-batch trades sequences with another one, one or two for none, one or
/// two, while that lowers the higher of the two. `levels_s`: by micro-batch.
void trade_between_bins(PackedBins& bins, std::span<const double> levels_s, uint64_t seed, const TradeLimits& limits);

}  // namespace knapformer
