// The constructive half of the balanced solver: places every sequence once, under a target time.
//
// Sequences come by descending work. Each takes the smallest degree of sharing with which it fits somewhere: for a
// degree the group that is free the longest is tried, and where the sequence would take that group beyond the target,
// the next larger degree. Sharing costs an exchange, so it is used only where a sequence would not fit otherwise. A
// target that is too low spreads everything; one that is too high leaves the last sequences nowhere to go: so a few are
// tried.
#pragma once

#include <cstdint>
#include <vector>

#include "knapformer/core/planners/balanced/placement_tree.h"
#include "knapformer/core/util/winner_tree.h"

namespace knapformer {

class Construction {
 public:
  explicit Construction(PlacementTrees& trees);

  /// By which time a group is held against the target: as it stands, or as if its exchange were even already (see
  /// PlacementTrees::even_group_time).
  enum class FitBy { kTime, kEvenTime };

  /// Empties the trees and places all its items. Returns the time of the slowest group, which may be above the target.
  double place_all(double target, FitBy fit_by, std::vector<int32_t>& node_of_item);

 private:
  /// Groups of one degree and about one speed. Groups only fill up, so a load that is out of date is too low, and
  /// bringing the minimum up to date until it stays the minimum suffices.
  struct Queue {
    std::vector<int32_t> nodes;  // ascending
    WinnerTree occupancy;        // by node
  };
  /// The group's load; or, of the target, the part of its tokens that it holds already.
  double occupancy(int32_t v) const;
  int32_t freest(Queue& queue);
  /// Of the groups with the k-th degree, the one that would be done first with the item on top of its load.
  int32_t freest_for(const TreeItem& item, size_t k);
  /// Where v is one of the smallest groups and connected to nothing: adds the item if v then stays within the target.
  /// What is above v is brought up to date later.
  bool place_alone(const TreeItem& item, int32_t v);
  void refresh_bag_of(int32_t v);
  /// Adds the item at the first node that fits it, or where it misses the target by the least.
  int32_t place(const TreeItem& item);

  PlacementTrees& trees_;
  double target_ = 0;
  FitBy fit_by_ = FitBy::kTime;
  std::vector<Queue> queues_;        // ascending by degree
  std::vector<size_t> first_queue_;  // by degree, and one past the last
  PlacementTrees::Paths paths_;
  std::vector<char> is_stale_;  // by bag: nodes above the smallest groups are out of date
};

}  // namespace knapformer
