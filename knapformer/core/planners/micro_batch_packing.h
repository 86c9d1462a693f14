// Packing: which micro-batch and which rank each sequence of a step goes to, as far as sequences stay whole.
//
// A micro-batch takes as long as its slowest rank, and the step the sum of that over micro-batches. So every
// micro-batch has a level, the time that all its ranks are filled to; levels may differ, and their sum counts. Where
// they add up to the work over the ranks and each bin (a rank in a micro-batch) is full, no time is lost.
//
//   level 1 |#####################|     the longest sequences set the first levels: each is the longest that is left;
//   level 2 |###########|               what remains of the time is divided evenly over the rest, so that no
//   level 3 |###########|               micro-batch holds more tokens than it must
//
// 1. Levels: as above, for `used` of the micro-batches (the others stay empty), at least `stepped` of them set by the
//    longest sequence that is left. Fewer and higher levels are easier to fill and need more memory.
// 2. Fill: sequences by descending work, each into the bin with the most time left below its level. A sequence beyond
//    every level is shared by the smallest group that brings it below, in the first micro-batch.
// 3. Refine: the bin furthest above its level trades sequences with another, one or two for none, one or two, while
// that
//    lowers the higher of the two.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "knapformer/core/plan/plan.h"
#include "knapformer/core/planners/balanced/placement_tree.h"

namespace knapformer {

struct PackingShape {
  int32_t used = 1;     // micro-batches that are not left empty
  int32_t stepped = 0;  // of them, how many have the longest sequence that is left as their level, at least
};

/// Where a sequence goes.
struct PackedSequence {
  int32_t micro_batch = 0;
  Placement placement;
};

class MicroBatchPacking {
 public:
  /// `bound_s`: what no sum of levels is below, of a block.
  MicroBatchPacking(const PlanInput& input, double bound_s);

  std::vector<double> levels_s(const PackingShape& shape, int32_t num_micro_batches) const;
  /// Of a block, by micro-batch: the time of its slowest bin.
  std::vector<double> pack(std::vector<double> levels_s);
  /// Lowers the times of the last pack, with about so many trades tried in each replica; stops where they add up to
  /// `good_enough_s`. Where no trade helps, it starts again up to `num_kicks` times, from the best so far with a few
  /// sequences swapped at random.
  std::vector<double> refine(int64_t num_trials, double good_enough_s, int32_t num_kicks = 0);

  /// Of the last pack: by micro-batch, whether its times and tokens are those of whole sequences that keep the limit.
  /// The others need a planner that shares.
  const std::vector<char>& is_whole() const { return is_whole_; }
  bool shares() const {
    return std::ranges::any_of(is_whole_, [](char whole) { return whole == 0; });
  }
  /// Of the last pack: tokens beyond what bins may hold, over all tokens; infinite where a whole micro-batch is over.
  double overflow() const;
  /// By sequence id.
  std::vector<PackedSequence> sequences() const;

 private:
  /// Bins of one kind: the smallest groups of a replica that have about one speed.
  struct Class {
    std::vector<int32_t> leaves;
    double time_per_token = 0, time_per_attention = 0;  // of its first leaf, in seconds
  };
  struct Leaf {
    int32_t node = 0;
    double time_per_token = 0, time_per_attention = 0;
    double token_capacity = 0;
  };
  struct Item {
    double tokens = 0, attention = 0;
    double longest_s = 0;  // the level that it needs
    int32_t num_leaves = 1;
    int32_t shared_node = -1;  // where it must be shared: any node of the degree
  };
  /// Bins that shared sequences connect. These are cut such that every bin has the group's mean of tokens, so a bin
  /// that holds more whole ones exchanges less. A bin that shares nothing is a group by itself.
  struct Group {
    int32_t first = 0, size = 1;    // bins
    double exchange_per_token = 0;  // in seconds, of a shared sequence's tokens
  };
  struct Replica {
    explicit Replica(PlacementTrees placement_trees) : trees(std::move(placement_trees)) {}

    PlacementTrees trees;
    std::vector<Leaf> leaves;
    std::vector<Class> classes;
    std::vector<int32_t> leaf_of_node;
    std::vector<Item> items;  // descending by work
    // Of the last pack. A bin is micro-batch * leaves + leaf.
    std::vector<double> token_s, attention_s;   // by bin: of the per-token layers, of attention
    std::vector<double> tokens, shared_tokens;  // by bin; the shared ones are among the first
    std::vector<Group> groups;                  // by bin
    std::vector<int32_t> first_item;            // by bin, -1 where it is empty
    std::vector<int32_t> next_item;             // by item
    std::vector<int32_t> bin_of_item;           // the first bin of a shared item
    std::vector<int32_t> node_of_item;          // -1: the bin's leaf
  };

  void add_leaves(Replica& replica) const;
  void add_items(Replica& replica) const;
  void fill(Replica& replica);
  void share(Replica& replica, int32_t item);
  void put(Replica& replica, int32_t item, int32_t bin) const;
  void take_out(Replica& replica, int32_t item, int32_t bin) const;
  std::vector<double> times_s() const;
  /// Of a group: its mean of tokens, in their layers and if all were exchanged, times its bins.
  static double token_sum_s(const Replica& replica, const Group& group);
  /// Of a bin: attention, less the exchange of what is whole.
  static double attention_s(const Replica& replica, int32_t bin);
  static double group_s(const Replica& replica, const Group& group);
  struct Lot;
  class Refinement;

  double bound_s_ = 0;
  int64_t max_tokens_ = 0;
  int32_t num_sequences_ = 0;
  uint64_t key_ = 0;
  std::vector<Replica> replicas_;
  std::vector<double> levels_s_;
  std::vector<char> is_whole_;
};

}  // namespace knapformer
