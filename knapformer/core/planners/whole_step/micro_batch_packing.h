// Packing: the micro-batch and the rank of each sequence of a step, as far as sequences stay whole.
//
// A micro-batch takes as long as its slowest rank, and the step takes the sum of its micro-batches. So every
// micro-batch has a level, the time up to which all its ranks are filled; levels may differ, and their sum counts. If
// the levels add up to the work divided by the ranks and each bin (a rank in a micro-batch) is full, no time is lost.
//
//   level 1 |#####################|     the longest sequences set the first levels: each is the longest that is left;
//   level 2 |###########|               what remains of the time is divided evenly over the rest, so that no
//   level 3 |###########|               micro-batch holds more tokens than it must
//
// 1. Levels: as above, for `used` of the micro-batches (the others stay empty), at least `stepped` of them set by the
//    longest remaining sequence. Fewer and higher levels are easier to fill and need more memory.
// 2. Fill: sequences by descending work, each into the bin with the most time left below its level. A sequence that
//    takes longer in one bin than the bound, or has too many tokens for it, is shared in the first micro-batch, by the
//    smallest group that fits it. With Sharing::kSpread it is shared in the micro-batch with the least time so far.
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
  int32_t stepped = 0;  // of these, at least so many have the longest remaining sequence as their level
};

/// Where the sequences go that must be shared.
enum class Sharing { kFirst, kSpread };

/// Where a sequence goes.
struct PackedSequence {
  int32_t micro_batch = 0;
  Placement placement;
};

class MicroBatchPacking {
 public:
  /// `bound_s`: a lower bound of the sum of levels, for one block; with kSpread of each level.
  MicroBatchPacking(const PlanInput& input, double bound_s, Sharing sharing = Sharing::kFirst);

  std::vector<double> levels_s(const PackingShape& shape, int32_t num_micro_batches) const;
  /// Packs under these levels. Returns, by micro-batch, the block time of its slowest bin.
  std::vector<double> pack(std::vector<double> levels_s);
  /// Lowers the times of the last pack by swaps in each replica. Returns the new times.
  std::vector<double> refine(const SwapLimits& limits);

  /// By micro-batch of the last pack: whether all its sequences are whole and keep the limit of tokens. The other
  /// micro-batches need a planner that shares.
  const std::vector<char>& is_whole() const { return is_whole_; }
  bool shares() const {
    return std::ranges::any_of(is_whole_, [](char whole) { return whole == 0; });
  }
  /// Of the last pack: the tokens beyond what bins may hold, over all tokens; infinite if a micro-batch as a whole has
  /// too many.
  double overflow() const;
  /// By sequence id.
  std::vector<PackedSequence> sequences() const;

 private:
  void fill(PackedBins& bins) const;
  std::vector<double> times_s() const;

  double bound_s_ = 0;
  Sharing sharing_;
  int64_t max_tokens_ = 0;
  int32_t num_sequences_ = 0;
  uint64_t key_ = 0;
  std::vector<PackedBins> replicas_;
  std::vector<double> levels_s_;
  std::vector<char> is_whole_;
};

}  // namespace knapformer
