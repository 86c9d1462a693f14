// The matching half of the assignment of homes: which of the blocks that may trade takes whose place.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "knapformer/core/plan.h"

namespace knapformer {

/// What one rank of those that share a sequence holds of it, where it is cut evenly.
int64_t share_of(const PlanInput& input, SequenceId id, const Placement& place);

/// The blocks of one degree: the aligned groups of so many ranks in the bags that allow it. Block i holds content i,
/// and contents trade slots where the keys are equal.
struct Blocks {
  std::vector<int32_t> first_rank;
  std::vector<int32_t> node;  // -1 where a block lies on several, or all it may trade with on the same
  std::vector<uint64_t> key;
  std::vector<int32_t> of_rank;  // by rank; -1: none

  int32_t count() const { return static_cast<int32_t>(first_rank.size()); }
  bool may_trade(int32_t a, int32_t b) const { return key[static_cast<size_t>(a)] == key[static_cast<size_t>(b)]; }
};

/// The slot of each content, so that most tokens are at home, else in their node. Of blocks that may trade the best
/// assignment of all where they are 3 to 16; else strongest pulls first, improved by exchanging pairs.
std::vector<int32_t> match_homes(const PlanInput& input, std::span<const Placement> placements, const Blocks& blocks,
                                 int32_t degree);

}  // namespace knapformer
