// Among plans that are equally good, the one that moves the least: groups of ranks that are alike may exchange what
// they hold, and so may sequences that are alike.
#pragma once

#include <span>

#include "knapformer/core/plan.h"

namespace knapformer {

/// Permutes the contents of bags of one shape, of the groups within them, and sequences of equal length and mask, so
/// that more tokens stay on their home rank, and of those that move more stay in their node. The predicted time stays
/// the same. Does nothing where ranks differ in speed. Matching is greedy, by falling tokens: O(n log n).
void assign_homes(const PlanInput& input, std::span<Placement> placements);

}  // namespace knapformer
