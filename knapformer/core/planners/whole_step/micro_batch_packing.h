// Packing: which micro-batch and which rank each sequence of a step goes to, as far as sequences stay whole.
//
// A micro-batch takes as long as its slowest rank, and the step the sum of that over micro-batches. So every
// micro-batch has a level, the time that all its ranks are filled to; levels may differ, and their sum counts. Where
// they add up to the work over the ranks and each bin (a rank in a micro-batch) is full, no time is lost.
//
//   level 1 |#####################|     the longest sequences set the first levels: each is the longest that is left;
//   level 2 |###########|               what remains of the time is divided evenly over the rest, so that no
//   level 3 |###########|               micro-batch holds more tokens than it must
//
// 1. Levels: as above, for `used` of the micro-batches (the others stay empty), at least `stepped` of them set by the
//    longest sequence that is left. Fewer and higher levels are easier to fill and need more memory.
// 2. Fill: sequences by descending work, each into the bin with the most time left below its level. A sequence beyond
//    every level is shared by the smallest group that brings it below, in the first micro-batch.
// 3. Refine: bins swap sequences (bin_swaps.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "knapformer/core/plan/plan.h"
#include "knapformer/core/planners/whole_step/bin_swaps.h"
#include "knapformer/core/planners/whole_step/packed_bins.h"

namespace knapformer {

struct PackingShape {
  int32_t used = 1;     // micro-batches that are not left empty
  int32_t stepped = 0;  // of them, how many have the longest sequence that is left as their level, at least
};

/// Where a sequence goes.
struct PackedSequence {
  int32_t micro_batch = 0;
  Placement placement;
};

class MicroBatchPacking {
 public:
  /// `bound_s`: what no sum of levels is below, of a block.
  MicroBatchPacking(const PlanInput& input, double bound_s);

  std::vector<double> levels_s(const PackingShape& shape, int32_t num_micro_batches) const;
  /// Of a block, by micro-batch: the time of its slowest bin.
  std::vector<double> pack(std::vector<double> levels_s);
  /// Lowers the times of the last pack, by swaps in each replica.
  std::vector<double> refine(const SwapLimits& limits);

  /// Of the last pack: by micro-batch, whether its times and tokens are those of whole sequences that keep the limit.
  /// The others need a planner that shares.
  const std::vector<char>& is_whole() const { return is_whole_; }
  bool shares() const {
    return std::ranges::any_of(is_whole_, [](char whole) { return whole == 0; });
  }
  /// Of the last pack: tokens beyond what bins may hold, over all tokens; infinite where a whole micro-batch is over.
  double overflow() const;
  /// By sequence id.
  std::vector<PackedSequence> sequences() const;

 private:
  void fill(PackedBins& bins) const;
  std::vector<double> times_s() const;

  double bound_s_ = 0;
  int64_t max_tokens_ = 0;
  int32_t num_sequences_ = 0;
  uint64_t key_ = 0;
  std::vector<PackedBins> replicas_;
  std::vector<double> levels_s_;
  std::vector<char> is_whole_;
};

}  // namespace knapformer
