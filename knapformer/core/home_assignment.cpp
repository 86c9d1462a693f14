#include "knapformer/core/home_assignment.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "knapformer/core/home_matching.h"
#include "knapformer/core/radix_sort.h"

namespace knapformer {
namespace {

class HomeAssignment {
 public:
  HomeAssignment(const PlanInput& input, std::span<Placement> placements) : input_(input), placements_(placements) {}

  void run() {
    const Topology& topology = input_.topology;
    for (int32_t r = 0; r < topology.num_ranks(); ++r) context_.push_back(r / topology.num_ranks_per_replica());
    num_contexts_ = topology.num_replicas();
    // Where no sequence is shared by a degree, what trading its blocks could do, trading smaller ones can.
    std::vector<char> is_used(static_cast<size_t>(topology.num_ranks()) + 1, 0);
    for (const Placement& place : placements_) is_used[static_cast<size_t>(place.degree)] = 1;
    for (int32_t degree = topology.num_ranks(); degree > 0; --degree) {
      if (is_used[static_cast<size_t>(degree)]) trade_blocks(degree);
    }
    assign_equal_sequences();
  }

 private:
  /// What a block is like: blocks of equal likeness take the same time with the same contents.
  struct Likeness {
    std::span<const int32_t> degrees;  // that the bag allows within
    int32_t place_on_node = -1;        // of the first rank; -1: all in one node
    std::span<const double> speeds;

    bool operator<(const Likeness& other) const {
      const auto key = [](const Likeness& l) { return std::tuple(l.place_on_node, l.degrees.size()); };
      if (key(*this) != key(other)) return key(*this) < key(other);
      if (!std::ranges::equal(degrees, other.degrees))
        return std::ranges::lexicographical_compare(degrees, other.degrees);
      return std::ranges::lexicographical_compare(speeds, other.speeds);
    }
  };

  Blocks blocks_of(int32_t degree) const {
    Blocks blocks;
    blocks.of_rank.assign(context_.size(), -1);
    std::map<Likeness, uint64_t> classes;
    auto last = classes.end();
    for (const Bag& bag : input_.topology.bags()) {
      const auto& degrees = input_.topology.shapes()[static_cast<size_t>(bag.shape)].degrees;
      const auto level = std::lower_bound(degrees.begin(), degrees.end(), degree);
      if (level == degrees.end() || *level != degree) continue;
      const bool bag_inside = input_.cluster.same_node(bag.first_rank, Rank(bag.first_rank.value + bag.num_ranks - 1));
      for (int32_t r = bag.first_rank.value; r < bag.first_rank.value + bag.num_ranks; r += degree) {
        const auto first = static_cast<size_t>(r), size = static_cast<size_t>(degree);
        const int32_t node = input_.cluster.ranks_per_node;
        const bool inside = input_.cluster.same_node(Rank(r), Rank(r + degree - 1));
        const std::span<const double> speeds = input_.rank_speed;
        const Likeness likeness{.degrees = {degrees.begin(), level},
                                .place_on_node = inside ? -1 : r % node,
                                .speeds = speeds.empty() ? speeds : speeds.subspan(first, size)};
        if (last == classes.end() || last->first < likeness || likeness < last->first)
          last = classes.try_emplace(likeness, classes.size()).first;
        std::fill_n(blocks.of_rank.begin() + r, degree, blocks.count());
        blocks.first_rank.push_back(r);
        blocks.node.push_back(inside && (!bag_inside || context_[first] < input_.topology.num_replicas()) ? r / node
                                                                                                          : -1);
        blocks.key.push_back(static_cast<uint64_t>(context_[first]) << 32 | last->second);
      }
    }
    return blocks;
  }

  /// Blocks of `degree` ranks trade places: those that the same group shares, or no group, in which sequences of more
  /// ranks lie. Then sequences of this degree stay where they are.
  void trade_blocks(int32_t degree) {
    const Blocks blocks = blocks_of(degree);
    const std::vector<int32_t> slot_of = match_homes(input_, placements_, blocks, degree);
    std::vector<char> is_shared(slot_of.size(), 0);
    for (Placement& place : placements_) {
      const int32_t content = place.degree > degree ? -1 : blocks.of_rank[place.first_rank.index()];
      if (content < 0) continue;
      const auto slot = static_cast<size_t>(slot_of[static_cast<size_t>(content)]);
      const int32_t offset = place.first_rank.value - blocks.first_rank[static_cast<size_t>(content)];
      place.first_rank = Rank(blocks.first_rank[slot] + offset);
      place.bag = input_.topology.bag_of(place.first_rank);
      if (place.degree == degree && !is_shared[slot]) {
        is_shared[slot] = 1;
        std::fill_n(context_.begin() + blocks.first_rank[slot], degree, num_contexts_++);
      }
    }
  }

  int64_t pairs_of(int32_t s) const {
    return input_.attention_pairs.empty() ? 0 : input_.attention_pairs[static_cast<size_t>(s)];
  }

  /// Sequences of equal length and mask trade places: first those that come home by it, then those that come into their
  /// node.
  void assign_equal_sequences() {
    for (int32_t replica = 0; replica < input_.topology.num_replicas(); ++replica) {
      const auto [first, last] = input_.sequences_of(replica);
      std::vector<KeyedIndex> order;
      order.reserve(last.index() - first.index());
      for (int32_t s = first.value; s < last.value; ++s) {
        order.push_back({.key = static_cast<uint64_t>(input_.seq_lens[SequenceId(s)]), .index = s});
      }
      sort_by_key(order);
      std::vector<int32_t> ids;
      for (size_t i = 0, j; i < order.size(); i = j) {
        for (j = i + 1; j < order.size() && order[j].key == order[i].key; ++j) {
        }
        if (j - i < 2) continue;
        // Of equal lengths those with equal masks: nearly always all.
        ids.clear();
        for (size_t k = i; k < j; ++k) ids.push_back(order[k].index);
        if (!input_.attention_pairs.empty())
          std::stable_sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) { return pairs_of(a) < pairs_of(b); });
        for (size_t a = 0, b; a < ids.size(); a = b) {
          for (b = a + 1; b < ids.size() && pairs_of(ids[b]) == pairs_of(ids[a]); ++b) {
          }
          if (b - a > 1) trade_sequences(std::span(ids).subspan(a, b - a));
        }
      }
    }
  }

  void trade_sequences(std::span<const int32_t> ids) {
    std::vector<Placement>& places = places_;
    places.clear();
    for (const int32_t s : ids) places.push_back(placements_[static_cast<size_t>(s)]);
    const auto key = [](const Placement& place) { return std::pair(place.degree, place.first_rank); };
    std::sort(places.begin(), places.end(), [&](const Placement& a, const Placement& b) { return key(a) < key(b); });
    is_taken_.assign(places.size(), 0);
    is_placed_.assign(ids.size(), 0);
    // Places of one degree, and sequences by their homes, are in rank order, so one pass over both finds what meets: in
    // the group that holds the home rank, then in the node, then anywhere. `here` and `wanted` only grow.
    const auto pass = [&](size_t first, size_t last, auto here, auto wanted) {
      size_t p = first;
      for (size_t i = 0; i < ids.size() && p < last; ++i) {
        if (is_placed_[i]) continue;
        const int32_t rank = wanted(input_.seq_lens.home_of(SequenceId(ids[i])).value);
        while (p < last && (is_taken_[p] || here(places[p].first_rank.value) < rank)) ++p;
        if (p == last || here(places[p].first_rank.value) != rank) continue;
        placements_[static_cast<size_t>(ids[i])] = places[p];
        is_taken_[p] = is_placed_[i] = 1;
      }
    };
    const auto for_each_degree = [&](auto use) {
      for (size_t first = 0, last; first < places.size(); first = last) {
        const int32_t degree = places[first].degree;
        for (last = first + 1; last < places.size() && places[last].degree == degree;) ++last;
        use(first, last, degree);
      }
    };
    const auto itself = [](int32_t rank) { return rank; };
    const auto node = [&](int32_t rank) { return rank / input_.cluster.ranks_per_node; };
    const auto anywhere = [](int32_t) { return 0; };
    for_each_degree([&](size_t first, size_t last, int32_t degree) {
      pass(first, last, itself, [&](int32_t home) {
        const int32_t first_of_bag = input_.topology.bag(input_.topology.bag_of(Rank(home))).first_rank.value;
        return home - (home - first_of_bag) % degree;
      });
    });
    for_each_degree([&](size_t first, size_t last, int32_t) { pass(first, last, node, node); });
    pass(0, places.size(), anywhere, anywhere);
  }

  const PlanInput& input_;
  std::span<Placement> placements_;
  std::vector<int32_t> context_;  // by rank: the smallest group so far that shares a sequence there; else the replica
  int32_t num_contexts_ = 0;
  std::vector<Placement> places_;
  std::vector<char> is_taken_, is_placed_;
};

/// Tokens of sequences [first, last) that stay on their rank, and on their node, where shared ones are cut evenly.
std::pair<int64_t, int64_t> tokens_that_stay(const PlanInput& input, std::span<const Placement> placements,
                                             SequenceId first, SequenceId last) {
  int64_t at_home = 0, in_node = 0;
  for (size_t s = first.index(); s < last.index(); ++s) {
    const SequenceId id(s);
    const int32_t home = input.seq_lens.home_of(id).value, num_in_node = input.cluster.ranks_per_node;
    const int32_t begin = placements[s].first_rank.value, end = begin + placements[s].degree;
    const int32_t first_in_node = home - home % num_in_node;
    const int64_t share = share_of(input, id, placements[s]);
    at_home += home >= begin && home < end ? share : 0;
    in_node += share * std::max(0, std::min(end, first_in_node + num_in_node) - std::max(begin, first_in_node));
  }
  return {at_home, in_node};
}

}  // namespace

void assign_homes(const PlanInput& input, std::span<Placement> placements) {
  if (placements.empty()) return;
  std::vector<Placement> trial(placements.begin(), placements.end());
  HomeAssignment(input, trial).run();
  // A larger block goes where most of its tokens are at home, and those may have been at home in it already.
  const int32_t num_ranks = input.topology.num_ranks_per_replica();
  for (int32_t replica = 0; replica < input.topology.num_replicas(); ++replica) {
    const SequenceId first = input.seq_lens.first_of(Rank(replica * num_ranks));
    const SequenceId last = input.seq_lens.last_of(Rank((replica + 1) * num_ranks - 1));
    if (tokens_that_stay(input, trial, first, last) > tokens_that_stay(input, placements, first, last))
      std::copy(trial.begin() + first.value, trial.begin() + last.value, placements.begin() + first.value);
  }
}

}  // namespace knapformer
