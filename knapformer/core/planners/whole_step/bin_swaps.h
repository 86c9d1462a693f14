// Swaps between the bins of a packed step: they lower the bins that are above their levels.
#pragma once

#include <cstdint>
#include <span>

#include "knapformer/core/planners/whole_step/packed_bins.h"

namespace knapformer {

struct SwapLimits {
  int64_t num_trials = 0;    // how many swaps are tried, about
  double good_enough_s = 0;  // stops when the micro-batches' times add up to at most this
  /// How often the search starts again when no swap helps: from the best packing so far, with a few sequences swapped
  /// at random.
  int32_t num_kicks = 0;
};

/// The bin that is furthest above the level of its micro-batch gives one or two sequences to another bin, and takes
/// none, one or two in return. This repeats while it lowers the higher of the two bins. `levels_s`: by micro-batch.
void swap_between_bins(PackedBins& bins, std::span<const double> levels_s, uint64_t seed, const SwapLimits& limits);

}  // namespace knapformer
