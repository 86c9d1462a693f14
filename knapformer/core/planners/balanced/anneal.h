// The improving half of the balanced solver: annealing over moves, swaps and changes of degree.
//
// A step proposes to move a sequence to another group (of any degree that makes sense for its size, in its bag or
// another one) or to swap two sequences (any two, or two of about the same work). It keeps the change if the energy of
// the bags involved falls. If the energy rises, it keeps the change with a probability that grows with the temperature.
// The result is the placement with the lowest time of the slowest group.
//
// Few sequences in flat bags are placed by branch and bound, which a local search cannot replace: ranks of 4, 3 and 2
// sequences may be even where no move or swap leads from 3, 3 and 3 to them.
//
// Steps are counted, not timed, and random numbers are counter-based with a key from the input: the result is the same
// on every machine.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "knapformer/core/planners/balanced/placement_tree.h"

namespace knapformer {

/// With 24 in bags of a rank, branch and bound takes a millisecond at default effort. With 12, plans of up to 24
/// sequences are 0.4 % slower, and 1.5 % at low effort; with 48 they are the same.
constexpr int32_t kFewItems = 24;

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

/// Places at most kFewItems items in as many of these groups, which have no rank in common, no slower than they lie.
/// Returns whether no other placement in the groups is faster. More items stay where they are.
bool place_few(PlacementTrees& trees, std::span<const int32_t> groups, std::vector<int32_t>& node_of_item,
               const SearchOptions& options);

/// Anneals the placement, which is left in the trees. It is never slower than before.
void improve(PlacementTrees& trees, std::vector<int32_t>& node_of_item, const SearchOptions& options);

/// What a replica's plan depends on: its own lengths.
uint64_t random_key(const PlanInput& input, int32_t replica);

}  // namespace knapformer
