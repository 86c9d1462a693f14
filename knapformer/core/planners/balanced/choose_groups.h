// Chooses the group of every sequence once, under a target time: where the balanced planner's search starts.
//
// Sequences come by descending work. Each takes the smallest degree of sharing with which it fits somewhere: for each
// degree the group with the least load is tried, and if the sequence would take that group beyond the target, the next
// larger degree is tried. Sharing costs an exchange, so it is used only if a sequence would not fit otherwise. A target
// that is too low shares everything; one that is too high leaves no place for the last sequences: so a few targets are
// tried.
#pragma once

#include <cstdint>
#include <vector>

#include "knapformer/core/planners/balanced/placement_tree.h"
#include "knapformer/core/util/interrupt.h"
#include "knapformer/core/util/winner_tree.h"

namespace knapformer {

class GroupChooser {
 public:
  explicit GroupChooser(PlacementTrees& trees);

  /// Which sequences are shared: those with which no smaller group keeps the target; those that exceed it alone, or the
  /// limit of tokens in any smaller group; or all, by as many ranks as can be, whatever the target.
  enum class Sharing { kToFit, kLeast, kMost };

  /// Empties the trees and places all their items. Returns the time of the slowest group, which may be above the
  /// target.
  double place_all(double target, Sharing sharing, std::vector<int32_t>& node_of_item);

  /// Places all items under a few targets above the bound of the time: doubling the margin while the placement misses
  /// its target, halving it while it meets it. Returns the best placement.
  std::vector<int32_t> place_under_targets(Sharing sharing, double bound, int32_t num_targets);

 private:
  /// Groups of one degree and about one speed. Groups only fill up, so an outdated load is too low. It is therefore
  /// enough to refresh the minimum until it stays the minimum.
  struct Queue {
    std::vector<int32_t> nodes;  // ascending
    WinnerTree occupancy;        // by node
  };
  /// The group's load, or the target times the used part of its token capacity, whichever is more.
  double occupancy(int32_t v) const;
  int32_t freest(Queue& queue);
  /// The group of the k-th degree that would be done first if the item were added to its load.
  int32_t freest_for(const TreeItem& item, size_t k);
  /// Adds the item if v is one of the smallest groups, is not connected to others, and then fits the target and its
  /// token capacity. The nodes above v are updated later. Returns whether it added the item.
  bool place_alone(const TreeItem& item, int32_t v);
  /// Whether v, and every group around it, is within its token capacity.
  bool has_room(int32_t v) const;
  void refresh_bag_of(int32_t v);
  /// Adds the item at the first node that fits it, or else at the node that exceeds the target least. Returns the node.
  int32_t place(const TreeItem& item);

  PlacementTrees& trees_;
  double target_ = 0;
  Sharing sharing_ = Sharing::kToFit;
  std::vector<Queue> queues_;        // ascending by degree
  std::vector<size_t> first_queue_;  // by degree, then the number of queues
  PlacementTrees::Paths paths_;
  InterruptChecks checks_;
  std::vector<char> is_stale_;  // by bag: nodes above the smallest groups are out of date
};

}  // namespace knapformer
