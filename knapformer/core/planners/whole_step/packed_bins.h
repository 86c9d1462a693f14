// The bins of one replica, into which micro_batch_packing.h packs the sequences of a step. A bin is one of the smallest
// groups of ranks that may hold a whole sequence, in one micro-batch.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "knapformer/core/plan/plan.h"
#include "knapformer/core/planners/balanced/placement_tree.h"

namespace knapformer {

struct PackedBins {
  /// Bins of one kind: the smallest groups of a replica that have about one speed.
  struct Class {
    std::vector<int32_t> leaves;
    double time_per_token = 0, time_per_attention = 0;  // of its fastest leaf, in seconds
  };
  struct Leaf {
    int32_t node = 0;
    double time_per_token = 0, time_per_attention = 0;
    double token_capacity = 0;
  };
  struct Item {
    double tokens = 0, attention = 0;
    double longest_s = 0;  // the lowest level that it fits
    int32_t num_leaves = 1;
    int32_t shared_node = -1;  // -1, or if it must be shared: any node of its degree
  };
  /// Bins that shared sequences connect. The shared sequences are cut so that every bin holds equally many tokens: a
  /// bin with more tokens of whole sequences gets fewer shared tokens, and exchanges less. A bin that shares nothing is
  /// a group by itself.
  struct Group {
    int32_t first = 0, size = 1;    // bins
    double exchange_per_token = 0;  // in seconds, of a token of a shared sequence
  };

  /// Starts without micro-batches. `bound_s`: a sequence that takes longer in one bin must be shared.
  PackedBins(const PlanInput& input, int32_t replica, double bound_s);

  /// Takes everything out, and makes the bins of `num_micro_batches` micro-batches.
  void clear(size_t num_micro_batches);
  int32_t num_leaves() const { return static_cast<int32_t>(leaves.size()); }
  int32_t num_bins() const { return static_cast<int32_t>(tokens.size()); }
  int32_t micro_batch_of(int32_t bin) const { return bin / num_leaves(); }
  const Leaf& leaf_of(int32_t bin) const { return leaves[bin % num_leaves()]; }
  /// Below zero if the bin does not keep the limit of tokens.
  double free_tokens(int32_t bin) const { return leaf_of(bin).token_capacity - tokens[bin]; }

  /// Puts a whole item into a bin, or takes it out.
  void put(int32_t item, int32_t bin);
  void take_out(int32_t item, int32_t bin);
  /// Shares an item in one of the first micro-batches, by the group whose fullest bin has the lowest load; among
  /// several micro-batches by one with room for even chunks, if there is one.
  void share(int32_t item, int32_t num_micro_batches);
  bool shares() const {
    return std::ranges::any_of(node_of_item, [](int32_t node) { return node >= 0; });
  }

  /// The time of a group's per-token layers, and of its exchange if all its tokens were exchanged, summed over its
  /// bins.
  double token_sum_s(const Group& group) const;
  /// The attention of a bin, less the exchange that token_sum_s counts for its whole sequences.
  double attention_less_exchange_s(int32_t bin) const;
  double group_s(const Group& group) const;

  PlacementTrees trees;
  std::vector<Leaf> leaves;
  std::vector<Class> classes;
  std::vector<int32_t> leaf_of_node;
  std::vector<Item> items;  // descending by work

  // A bin is micro-batch * leaves + leaf.
  std::vector<double> token_s, attention_s;   // by bin: seconds of the per-token layers and of attention
  std::vector<double> tokens, shared_tokens;  // by bin; `tokens` includes the shared ones
  std::vector<Group> groups;                  // by bin
  std::vector<int32_t> first_item;            // by bin, -1 where it is empty
  std::vector<int32_t> next_item;             // by item
  std::vector<int32_t> bin_of_item;           // the first bin of a shared item
  std::vector<int32_t> node_of_item;          // -1: the bin's leaf

 private:
  void add_leaves(int64_t max_tokens);
  void add_items(double bound_s, int64_t max_tokens);
};

}  // namespace knapformer
