#include "knapformer/core/planners/balanced/locality.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "knapformer/core/cost/step_time.h"
#include "knapformer/core/util/sort.h"

namespace knapformer {
namespace {

/// What one rank of those that share a sequence holds of it, where it is cut evenly.
int64_t share_of(const PlanInput& input, SequenceId id, const Placement& place) {
  return input.seq_lens[id] / place.degree;
}

/// The aligned groups of one degree. Block i holds item i, and items swap blocks of one class.
struct Blocks {
  std::vector<int32_t> first_rank;
  std::vector<int32_t> class_of;
  std::vector<int32_t> of_rank;  // -1: none

  int32_t count() const { return static_cast<int32_t>(first_rank.size()); }
};

/// So many tokens of an item are at home in a block.
struct Affinity {
  int64_t tokens = 0;
  int32_t item = 0;
  int32_t block = 0;
};

class Locality {
 public:
  Locality(const PlanInput& input, std::span<Placement> placements) : input_(input), placements_(placements) {}

  void run() {
    const Topology& topology = input_.topology;
    for (int32_t r = 0; r < topology.num_ranks(); ++r) context_.push_back(r / topology.num_ranks_per_replica());
    num_contexts_ = topology.num_replicas();
    // Where no sequence is shared by a degree, what swapping its blocks could do, swapping smaller ones can.
    std::vector<char> is_used(static_cast<size_t>(topology.num_ranks()) + 1, 0);
    for (const Placement& place : placements_) is_used[place.degree] = 1;
    for (int32_t degree = topology.num_ranks(); degree > 0; --degree) {
      if (is_used[degree]) swap_blocks(degree);
    }
    swap_equal_sequences();
  }

 private:
  int32_t node_of(int32_t rank) const { return input_.cluster.node_of(Rank(rank)); }

  Blocks blocks_of(int32_t degree) const {
    struct Key {
      int32_t shape, place_on_node;       // of those with the same degrees within; -1: all in one node
      std::span<const int32_t> contexts;  // of the block's ranks, as their speeds
      std::span<const double> speeds;

      bool operator<(const Key& other) const {
        const std::pair own(shape, place_on_node), others(other.shape, other.place_on_node);
        if (own != others) return own < others;
        if (!std::ranges::equal(contexts, other.contexts))
          return std::ranges::lexicographical_compare(contexts, other.contexts);
        return std::ranges::lexicographical_compare(speeds, other.speeds);
      }
    };
    std::map<Key, int32_t> classes;
    // Shapes that allow the same degrees within, by the first of them.
    const auto shapes = input_.topology.shapes();
    const auto degrees_within = [&](size_t s) {
      return std::ranges::subrange(shapes[s].degrees.begin(), std::ranges::upper_bound(shapes[s].degrees, degree));
    };
    std::vector<int32_t> like_shape;
    for (size_t s = 0; s < shapes.size(); ++s) {
      size_t first = 0;
      while (!std::ranges::equal(degrees_within(first), degrees_within(s))) ++first;
      like_shape.push_back(static_cast<int32_t>(first));
    }
    Blocks blocks;
    blocks.of_rank.assign(context_.size(), -1);
    for (const Bag& bag : input_.topology.bags()) {
      const auto& degrees = input_.topology.shapes()[bag.shape].degrees;
      if (!std::ranges::binary_search(degrees, degree)) continue;
      for (int32_t r = bag.first_rank.value; r < bag.first_rank.value + bag.num_ranks; r += degree) {
        const bool inside = node_of(r) == node_of(r + degree - 1);
        const auto of_block = [&](auto values) {
          return values.empty() ? values : values.subspan(static_cast<size_t>(r), static_cast<size_t>(degree));
        };
        const Key key{.shape = like_shape[bag.shape],
                      .place_on_node = inside ? -1 : r % input_.cluster.ranks_per_node,
                      .contexts = of_block(std::span<const int32_t>(context_)),
                      .speeds = of_block(std::span<const double>(input_.rank_speed))};
        const auto size = static_cast<int32_t>(classes.size());
        std::fill_n(blocks.of_rank.begin() + r, degree, blocks.count());
        blocks.first_rank.push_back(r);
        blocks.class_of.push_back(classes.try_emplace(key, size).first->second);
      }
    }
    return blocks;
  }

  /// Sequences by item; of one item ascending by home.
  std::vector<KeyedIndex> sequences_of(const Blocks& blocks, int32_t degree) const {
    std::vector<KeyedIndex> sequences;
    sequences.reserve(placements_.size());
    for (size_t s = 0; s < placements_.size(); ++s) {
      const Placement& place = placements_[s];
      const int32_t item = place.degree > degree ? -1 : blocks.of_rank[place.first_rank.value];
      if (item >= 0) sequences.push_back({.key = static_cast<uint64_t>(item), .index = static_cast<int32_t>(s)});
    }
    sort_by_key(sequences);
    return sequences;
  }

  /// The block of each item: first, the most tokens first, one where it has tokens at home; then its own, or any free
  /// one of its class.
  std::vector<int32_t> match(const Blocks& blocks, int32_t degree) const {
    std::vector<Affinity> affinities;
    for (const KeyedIndex& sequence : sequences_of(blocks, degree)) {
      const SequenceId id(sequence.index);
      const auto item = static_cast<int32_t>(sequence.key);
      const int32_t block = blocks.of_rank[input_.seq_lens.home_of(id).value];
      if (block < 0 || blocks.class_of[block] != blocks.class_of[item]) continue;
      const int64_t tokens = share_of(input_, id, placements_[id.index()]);
      if (!affinities.empty() && affinities.back().item == item && affinities.back().block == block) {
        affinities.back().tokens += tokens;
      } else {
        affinities.push_back({.tokens = tokens, .item = item, .block = block});
      }
    }
    std::vector<KeyedIndex> order(affinities.size());
    for (size_t i = 0; i < order.size(); ++i)
      order[i] = {.key = ~static_cast<uint64_t>(affinities[i].tokens), .index = static_cast<int32_t>(i)};
    sort_by_key(order);

    std::vector<int32_t> block_of(blocks.first_rank.size(), -1);
    std::vector<char> is_taken(block_of.size(), 0);
    const auto take = [&](int32_t item, int32_t block) {
      if (block_of[item] >= 0 || is_taken[block]) return;
      block_of[item] = block;
      is_taken[block] = 1;
    };
    for (const KeyedIndex& next : order) take(affinities[next.index].item, affinities[next.index].block);
    for (int32_t item = 0; item < blocks.count(); ++item) take(item, item);
    std::map<int32_t, std::vector<int32_t>> free;  // by class
    for (int32_t b = blocks.count() - 1; b >= 0; --b) {
      if (!is_taken[b]) free[blocks.class_of[b]].push_back(b);
    }
    for (int32_t item = 0; item < blocks.count(); ++item) {
      if (block_of[item] >= 0) continue;
      std::vector<int32_t>& blocks_left = free[blocks.class_of[item]];
      take(item, blocks_left.back());
      blocks_left.pop_back();
    }
    return block_of;
  }

  void swap_blocks(int32_t degree) {
    const Blocks blocks = blocks_of(degree);
    const std::vector<int32_t> block_of = match(blocks, degree);
    std::vector<char> is_shared(block_of.size(), 0);
    for (Placement& place : placements_) {
      const int32_t item = place.degree > degree ? -1 : blocks.of_rank[place.first_rank.value];
      if (item < 0) continue;
      const int32_t block = block_of[item];
      place.first_rank = Rank(blocks.first_rank[block] + place.first_rank.value - blocks.first_rank[item]);
      place.bag = input_.topology.bag_of(place.first_rank);
      // From now on the sequences of this degree stay where they are, and smaller blocks swap below them.
      if (place.degree == degree && !is_shared[block]) {
        is_shared[block] = 1;
        mark_shared(blocks.first_rank[block], degree);
      }
    }
  }

  /// Ranks of a group that shares a sequence are alike where they have as much of its heads and of its exchanges.
  void mark_shared(int32_t first_rank, int32_t degree) {
    const bool is_even = input_.attention_shares().is_even(degree);
    const bool inside = node_of(first_rank) == node_of(first_rank + degree - 1);
    std::map<std::tuple<int32_t, int32_t, int32_t>, int32_t> contexts;
    for (int32_t r = first_rank; r < first_rank + degree; ++r) {
      const int32_t node_first = r - r % input_.cluster.ranks_per_node;
      const int32_t num_in_node =
          std::min(node_first + input_.cluster.ranks_per_node, first_rank + degree) - std::max(node_first, first_rank);
      const std::tuple alike(context_[r], inside ? 0 : num_in_node, is_even ? 0 : r - first_rank);
      const auto next = num_contexts_ + static_cast<int32_t>(contexts.size());
      context_[r] = contexts.try_emplace(alike, next).first->second;
    }
    num_contexts_ += static_cast<int32_t>(contexts.size());
  }

  /// Sequences of equal length and mask swap places: first those that come home by it, then those that come into their
  /// node.
  void swap_equal_sequences() {
    const auto pairs_of = [&](int32_t s) { return input_.attention_pairs.empty() ? 0 : input_.attention_pairs[s]; };
    for (int32_t replica = 0; replica < input_.topology.num_replicas(); ++replica) {
      const auto [first, last] = input_.sequences_of(replica);
      std::vector<KeyedIndex> order;
      for (int32_t s = first.value; s < last.value; ++s)
        order.push_back({.key = static_cast<uint64_t>(pairs_of(s)), .index = s});
      if (!input_.attention_pairs.empty()) sort_by_key(order);
      for (KeyedIndex& sequence : order)
        sequence.key = static_cast<uint64_t>(input_.seq_lens[SequenceId(sequence.index)]);
      sort_by_key(order);
      for (size_t i = 0, j; i < order.size(); i = j) {
        const auto is_equal = [&](const KeyedIndex& other) {
          return other.key == order[i].key && pairs_of(other.index) == pairs_of(order[i].index);
        };
        for (j = i + 1; j < order.size() && is_equal(order[j]);) ++j;
        if (j - i > 1) swap_sequences(std::span(order).subspan(i, j - i));
      }
    }
  }

  /// `ids`: ascending, and so by home.
  void swap_sequences(std::span<const KeyedIndex> ids) {
    std::vector<Placement>& places = places_;
    places.clear();
    for (const KeyedIndex& id : ids) places.push_back(placements_[id.index]);
    std::ranges::sort(places, {}, [](const Placement& place) { return std::pair(place.degree, place.first_rank); });
    is_taken_.assign(places.size(), 0);
    is_placed_.assign(ids.size(), 0);
    // Places of one degree, and sequences by their homes, are in rank order: so one pass over both finds those that
    // share a target, in the group that holds the home rank, then in the node, then anywhere.
    const auto pass = [&](auto target_of_place, auto target_of_home) {
      for (size_t first = 0, last; first < places.size(); first = last) {
        const int32_t degree = places[first].degree;
        for (last = first + 1; last < places.size() && places[last].degree == degree;) ++last;
        size_t p = first;
        for (size_t i = 0; i < ids.size() && p < last; ++i) {
          if (is_placed_[i]) continue;
          const int32_t target = target_of_home(input_.seq_lens.home_of(SequenceId(ids[i].index)).value, degree);
          while (p < last && (is_taken_[p] || target_of_place(places[p].first_rank.value) < target)) ++p;
          if (p == last || target_of_place(places[p].first_rank.value) != target) continue;
          placements_[ids[i].index] = places[p];
          is_taken_[p] = is_placed_[i] = 1;
        }
      }
    };
    pass([](int32_t rank) { return rank; },
         [&](int32_t home, int32_t degree) {
           const int32_t first_of_bag = input_.topology.bag(input_.topology.bag_of(Rank(home))).first_rank.value;
           return home - (home - first_of_bag) % degree;
         });
    pass([&](int32_t rank) { return node_of(rank); }, [&](int32_t home, int32_t) { return node_of(home); });
    pass([](int32_t) { return 0; }, [](int32_t, int32_t) { return 0; });
  }

  const PlanInput& input_;
  std::span<Placement> placements_;
  std::vector<int32_t> context_;  // by rank: equal where the larger groups that share a sequence there are alike
  int32_t num_contexts_ = 0;
  std::vector<Placement> places_;
  std::vector<char> is_taken_, is_placed_;
};

/// What a replica's placements move, where shared sequences are cut evenly: the slowest rank's seconds for a token's
/// byte, then the tokens of all.
std::pair<double, int64_t> moved_by(const PlanInput& input, std::span<const Placement> placements, int32_t replica) {
  const int32_t num_ranks = input.topology.num_ranks_per_replica(), first_rank = replica * num_ranks;
  std::vector<Traffic> sent(static_cast<size_t>(num_ranks)), received(sent.size());
  int64_t moved = 0;
  const auto [first, last] = input.sequences_of(replica);
  for (int32_t s = first.value; s < last.value; ++s) {
    const Rank home = input.seq_lens.home_of(SequenceId(s));
    const int64_t share = share_of(input, SequenceId(s), placements[s]);
    for (int32_t r = placements[s].first_rank.value; r < placements[s].first_rank.value + placements[s].degree; ++r) {
      if (r == home.value) continue;
      const auto link = input.cluster.same_node(Rank(r), home) ? &Traffic::inside : &Traffic::between;
      sent[home.value - first_rank].*link += static_cast<double>(share);
      received[r - first_rank].*link += static_cast<double>(share);
      moved += share;
    }
  }
  double slowest = 0;
  for (const std::vector<Traffic>& traffic : {sent, received}) {
    for (const Traffic& t : traffic) {
      slowest =
          std::max({slowest, t.inside / input.cluster.node_bytes_per_s, t.between / input.cluster.network_bytes_per_s});
    }
  }
  return {slowest, moved};
}

}  // namespace

void improve_locality(const PlanInput& input, std::span<Placement> placements) {
  std::vector<Placement> trial(placements.begin(), placements.end());
  Locality(input, trial).run();
  // A larger block goes where most of its tokens are at home, and those may have been at home in it already; nor does
  // what most tokens gain by make the slowest rank faster.
  for (int32_t replica = 0; replica < input.topology.num_replicas(); ++replica) {
    const auto [first, last] = input.sequences_of(replica);
    const auto after = moved_by(input, trial, replica), before = moved_by(input, placements, replica);
    if (after < before && after.second <= before.second)
      std::copy(trial.begin() + first.value, trial.begin() + last.value, placements.begin() + first.value);
  }
}

}  // namespace knapformer
