// Locality: of plans that take equally long, one that moves fewer tokens. Groups of ranks that are alike may swap what
// they hold, and so may sequences that are alike.
#pragma once

#include <span>

#include "knapformer/core/plan/plan.h"

namespace knapformer {

/// From the largest degree down, aligned blocks of so many ranks swap what they hold: among all blocks of a replica
/// that no larger group shares, and among those that the same one does. They must allow the same degrees within, have
/// the same speeds, rank by rank, and lie alike on the nodes. Then sequences of equal length and mask swap. So the time
/// of the blocks and the tokens per rank stay what they are, to the tokens that do not divide, and no more tokens leave
/// their home rank, counted as if cut evenly.
///
/// Greedy, in one pass: the contents with the most tokens at home in a block come first. About O(n log n) for each
/// degree that the plan uses. Then, if `swaps_for_route`, the rank whose route takes longest swaps with others, while
/// that helps, also single sequences of about equal work. Does nothing where nothing is routed.
void improve_locality(const PlanInput& input, std::span<Placement> placements, bool swaps_for_route = true);

}  // namespace knapformer
