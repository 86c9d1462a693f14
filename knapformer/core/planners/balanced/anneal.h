// The improving half of the balanced solver: annealing over moves, swaps and changes of degree.
//
// A step proposes to move a sequence to another group (of any degree that makes sense for its size, in its bag or
// another one) or to swap two sequences (any two, or two of about the same work). It keeps the change if the energy of
// the bags involved falls. If the energy rises, it keeps the change with a probability that grows with the temperature.
// The result is the placement with the lowest time of the slowest group.
//
// Steps are counted, not timed, and random numbers are counter-based with a key from the input: the result is the same
// on every machine.
#pragma once

#include <cstdint>
#include <vector>

#include "knapformer/core/planners/balanced/placement_tree.h"

namespace knapformer {

struct SearchOptions {
  int64_t num_moves = 0;
  /// random_key, or another number that follows from the input.
  uint64_t key = 0;
  /// No placement has a lower time of its slowest group.
  double bound = 0;
  /// Stops when the slowest group takes no longer than this: what is left to gain does not matter.
  double good_enough = 0;
  /// Whether a round comes first in which every item stays in the smallest groups that it fits into.
  bool shares_least_first = false;
  /// In units of energy, at the first step; a second round starts from the default.
  double first_temperature = 1;
};

/// Anneals the placement, which is left in the trees. It is never slower than before.
void improve(PlacementTrees& trees, std::vector<int32_t>& node_of_item, const SearchOptions& options);

/// What a replica's plan depends on: its own lengths.
uint64_t random_key(const PlanInput& input, int32_t replica);

}  // namespace knapformer
