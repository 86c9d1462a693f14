// Branch and bound, for few sequences in groups of ranks: a local search cannot replace it, as ranks of 4, 3 and 2
// sequences may be even where no move or swap leads from 3, 3 and 3 to them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "knapformer/core/planners/balanced/placement_tree.h"

namespace knapformer {

/// Places the items anew in these groups, which share no rank, no slower than they lie; not more than 24 items or
/// groups. The more moves, the more trials. Returns whether no other placement in the groups is faster.
bool place_few(PlacementTrees& trees, std::span<const int32_t> groups, std::vector<int32_t>& node_of_item,
               double good_enough, int64_t num_moves);

}  // namespace knapformer
