#include "knapformer/core/planners/balanced/locality.h"

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

#include "knapformer/core/planners/balanced/route_swaps.h"
#include "knapformer/core/util/sort.h"

namespace knapformer {
namespace {

class Locality {
 public:
  Locality(const PlanInput& input, std::span<Placement> placements) : input_(input), placements_(placements) {}

  void run() {
    const Topology& topology = input_.topology;
    for (int32_t r = 0; r < topology.num_ranks(); ++r) {
      const int32_t replica = r / topology.num_ranks_per_replica();
      traits_.push_back({static_cast<double>(replica), input_.speed_of(Rank(r))});
    }
    // Where no sequence is shared by a degree, what swapping its blocks could do, swapping smaller ones can.
    std::set<int32_t, std::greater<>> degrees;
    for (const Placement& place : placements_) degrees.insert(place.degree);
    for (const int32_t degree : degrees) swap_blocks(degree);
    for (int32_t replica = 0; replica < topology.num_replicas(); ++replica) swap_equal_sequences(replica);
  }

  std::span<Blocks> blocks() { return blocks_; }

 private:
  /// Blocks are of one class where the same degrees are allowed within, and their ranks are alike and lie alike on the
  /// nodes.
  Blocks blocks_of(int32_t degree) const {
    Blocks blocks{
        .degree = degree, .first_rank = {}, .class_of = {}, .of_rank = std::vector<int32_t>(traits_.size(), -1)};
    std::map<std::vector<double>, int32_t> classes;
    std::vector<double> alike;
    for (const Bag& bag : input_.topology.bags()) {
      const auto& degrees = input_.topology.shapes()[bag.shape].degrees;
      if (!std::ranges::binary_search(degrees, degree)) continue;
      for (int32_t r = bag.first_rank.value; r < bag.first_rank.value + bag.num_ranks; r += degree) {
        alike.assign(degrees.begin(), std::ranges::upper_bound(degrees, degree));
        const bool is_in_node = input_.cluster.same_node(Rank(r), Rank(r + degree - 1));
        alike.push_back(is_in_node ? -1 : r % input_.cluster.ranks_per_node);
        for (int32_t i = r; i < r + degree; ++i) alike.insert(alike.end(), traits_[i].begin(), traits_[i].end());
        std::fill_n(blocks.of_rank.begin() + r, degree, blocks.count());
        blocks.first_rank.push_back(r);
        blocks.class_of.push_back(classes.try_emplace(alike, classes.size()).first->second);
      }
    }
    return blocks;
  }

  /// The block of each item: first, the most tokens first, one where it has tokens at home. `item_of`: by sequence.
  std::vector<int32_t> match(const Blocks& blocks, int32_t degree, std::span<const int32_t> item_of) const {
    std::vector<std::pair<int32_t, int32_t>> pairs;  // of an item and a block of its class that is home to some of it
    std::vector<KeyedIndex> order;
    std::vector<int64_t> tokens(blocks.first_rank.size(), 0);  // by item
    std::vector<int32_t> items;
    for (int32_t block = 0; block < blocks.count(); ++block) {
      items.clear();
      const int32_t first_rank = blocks.first_rank[block];
      const SequenceId last = input_.seq_lens.last_of(Rank(first_rank + degree - 1));
      for (SequenceId id = input_.seq_lens.first_of(Rank(first_rank)); id < last; ++id.value) {
        const int32_t item = item_of[id.index()];
        if (item < 0 || blocks.class_of[item] != blocks.class_of[block]) continue;
        if (tokens[item] == 0) items.push_back(item);
        tokens[item] += share_of(input_, id, placements_[id.index()]);
      }
      for (const int32_t item : items) {
        order.push_back(
            {.key = ~static_cast<uint64_t>(std::exchange(tokens[item], 0)), .index = int32_t(pairs.size())});
        pairs.emplace_back(item, block);
      }
    }
    sort_by_key(order);

    std::vector<int32_t> block_of(tokens.size(), -1), item_in(tokens.size(), -1);
    const auto put = [&](int32_t item, int32_t block) {
      block_of[item] = block;
      item_in[block] = item;
    };
    for (const KeyedIndex& next : order) {
      const auto [item, block] = pairs[next.index];
      if (block_of[item] < 0 && item_in[block] < 0) put(item, block);
    }
    // The others stay, or go where the item went that took their block, or the one that took that one's, and so on.
    for (int32_t item = 0; item < blocks.count(); ++item) {
      int32_t block = item;
      while (block_of[item] < 0 && item_in[block] >= 0) block = item_in[block];
      if (block_of[item] < 0) put(item, block);
    }
    return block_of;
  }

  void swap_blocks(int32_t degree) {
    const Blocks& blocks = blocks_.emplace_back(blocks_of(degree));
    std::vector<int32_t> item_of;  // by sequence; -1: shared by more ranks, or in no block
    item_of.reserve(placements_.size());
    for (const Placement& place : placements_)
      item_of.push_back(place.degree > degree ? -1 : blocks.of_rank[place.first_rank.index()]);
    const std::vector<int32_t> block_of = match(blocks, degree, item_of);
    std::vector<char> is_shared(block_of.size(), 0);
    for (size_t s = 0; s < item_of.size(); ++s) {
      if (item_of[s] < 0) continue;
      Placement& place = placements_[s];
      const int32_t block = block_of[item_of[s]];
      place.first_rank = Rank(place.first_rank.value + blocks.first_rank[block] - blocks.first_rank[item_of[s]]);
      place.bag = input_.topology.bag_of(place.first_rank);
      if (place.degree == degree) is_shared[block] = 1;
    }
    // From now on the sequences of this degree stay where they are, and smaller blocks swap below them.
    for (int32_t b = 0; b < blocks.count(); ++b) {
      if (is_shared[b]) mark_shared(blocks.first_rank[b], degree);
    }
  }

  /// Ranks of a group that shares a sequence are alike where they have as much of its heads and of its exchanges.
  void mark_shared(int32_t first_rank, int32_t degree) {
    const int32_t node = input_.cluster.ranks_per_node, end = first_rank + degree;
    const bool is_even = input_.attention_shares().is_even(degree);
    for (int32_t r = first_rank; r < end; ++r) {
      const int32_t num_in_node = std::min(r - r % node + node, end) - std::max(r - r % node, first_rank);
      traits_[r].insert(traits_[r].end(), {static_cast<double>(first_rank), static_cast<double>(num_in_node),
                                           static_cast<double>(is_even ? 0 : r - first_rank)});
    }
  }

  void swap_equal_sequences(int32_t replica) {
    const std::vector<SequenceId> order = input_.by_descending_work(replica);
    for (auto first = order.begin(), last = first; first != order.end(); first = last) {
      last = std::find_if(first, order.end(), [&](SequenceId id) {
        return input_.seq_lens[id] != input_.seq_lens[*first] || input_.pairs_of(id) != input_.pairs_of(*first);
      });
      if (last - first > 1) swap_sequences({first, last});
    }
  }

  /// First those that come home by it, then those that come into their node.
  void swap_sequences(std::span<const SequenceId> ids) {
    places_.clear();
    for (const SequenceId id : ids) places_.push_back(placements_[id.index()]);
    std::ranges::sort(places_, {}, [](const Placement& place) { return std::pair(place.degree, place.first_rank); });
    next_free_.resize(ids.size() + 1);
    std::iota(next_free_.begin(), next_free_.end(), size_t{0});
    for (const int32_t reach : {1, input_.cluster.ranks_per_node, input_.topology.num_ranks()}) {
      std::erase_if(places_, [&](const Placement& place) {
        const int32_t first_home = place.first_rank.value / reach * reach;
        auto i = static_cast<size_t>(std::ranges::lower_bound(ids, input_.seq_lens.first_of(Rank(first_home))) -
                                     ids.begin());
        while (next_free_[i] != i) i = next_free_[i] = next_free_[next_free_[i]];
        if (i == ids.size() || input_.seq_lens.home_of(ids[i]).value >= first_home + std::max(place.degree, reach))
          return false;
        placements_[ids[i].index()] = place;
        next_free_[i] = i + 1;
        return true;
      });
    }
  }

  const PlanInput& input_;
  std::span<Placement> placements_;
  std::vector<Blocks> blocks_;  // of each degree that the plan uses, descending
  /// By rank: its replica and speed, and what it has of each larger group that shares a sequence there. Ranks with the
  /// same are alike.
  std::vector<std::vector<double>> traits_;
  std::vector<Placement> places_;
  std::vector<size_t> next_free_;  // of equal sequences: itself where it is free
};

}  // namespace

void improve_locality(const PlanInput& input, std::span<Placement> placements, bool swaps_for_route) {
  if (!input.model.routed) return;
  std::vector<Placement> trial(placements.begin(), placements.end());
  Locality locality(input, trial);
  locality.run();
  // A larger block goes where most of its tokens are at home, and those may have been at home in it already; nor does
  // what most tokens gain by make the slowest rank faster.
  for (int32_t replica = 0; replica < input.topology.num_replicas(); ++replica) {
    const auto [first, last] = input.sequences_of(replica);
    const auto before = RouteSwaps(input, placements, replica).figures();
    RouteSwaps swaps(input, trial, replica);
    if (swaps_for_route) swaps.run(locality.blocks(), before.second);
    const auto after = swaps.figures();
    if (after < before && after.second <= before.second)
      std::copy(trial.begin() + first.value, trial.begin() + last.value, placements.begin() + first.value);
  }
}

}  // namespace knapformer
