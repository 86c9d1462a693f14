// Among plans that are equally good, the one that moves the least: groups of ranks that are alike may exchange what
// they hold, and so may sequences that are alike.
#pragma once

#include <span>

#include "knapformer/core/plan.h"

namespace knapformer {

/// From the largest degree down, the contents of aligned blocks of so many ranks trade places: among all blocks of a
/// replica that no larger group shares, and among those that the same one does. They must allow the same degrees
/// within, have the same speeds, rank by rank, and lie alike on the nodes. Then sequences of equal length and mask
/// trade. So predicted times and tokens per rank stay what they are, to the tokens that do not divide, and no more
/// tokens leave their home rank, counted as if cut evenly.
///
/// Where at most 16 blocks may trade with each other, the match is the best at its degree; else strongest pulls come
/// first, then pairs are exchanged. What comes home by no trade goes into its home's node. About O(n log n) per degree
/// that the plan uses.
void assign_homes(const PlanInput& input, std::span<Placement> placements);

}  // namespace knapformer
