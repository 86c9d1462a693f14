#include "knapformer/core/home_assignment.h"

#include <algorithm>
#include <array>
#include <tuple>
#include <vector>

#include "knapformer/core/radix_sort.h"

namespace knapformer {
namespace {

/// So many tokens of `content` would be at home in `slot`.
struct Pull {
  int64_t tokens = 0;
  int32_t content = 0;
  int32_t slot = 0;
};

/// Gives each content a slot of its own: strongest pulls first (of equal ones those that come first), the rest in
/// order. `slot_of` holds -1 where free, on entry everywhere.
void match(std::span<const Pull> pulls, std::span<int32_t> slot_of, std::vector<char>& slot_taken) {
  std::vector<KeyedIndex> order;
  order.reserve(pulls.size());
  for (size_t i = 0; i < pulls.size(); ++i)
    order.push_back({.key = ~static_cast<uint64_t>(pulls[i].tokens), .index = static_cast<int32_t>(i)});
  sort_by_key(order);
  slot_taken.assign(slot_of.size(), 0);
  for (const KeyedIndex& item : order) {
    const Pull& pull = pulls[static_cast<size_t>(item.index)];
    int32_t& slot = slot_of[static_cast<size_t>(pull.content)];
    if (slot >= 0 || slot_taken[static_cast<size_t>(pull.slot)]) continue;
    slot = pull.slot;
    slot_taken[static_cast<size_t>(pull.slot)] = 1;
  }
  // Those that nothing pulls stay where they are if they can.
  for (size_t c = 0; c < slot_of.size(); ++c) {
    if (slot_of[c] < 0 && !slot_taken[c]) {
      slot_of[c] = static_cast<int32_t>(c);
      slot_taken[c] = 1;
    }
  }
  size_t next = 0;
  for (int32_t& slot : slot_of) {
    if (slot >= 0) continue;
    while (slot_taken[next]) ++next;
    slot = static_cast<int32_t>(next);
    slot_taken[next] = 1;
  }
}

/// Joins pulls of the same content and slot, and brings them in order by both.
void merge(std::vector<Pull>& pulls) {
  std::vector<KeyedIndex> order;
  order.reserve(pulls.size());
  for (size_t i = 0; i < pulls.size(); ++i) {
    order.push_back({.key = static_cast<uint64_t>(pulls[i].content) << 32 | static_cast<uint64_t>(pulls[i].slot),
                     .index = static_cast<int32_t>(i)});
  }
  sort_by_key(order);
  std::vector<Pull> merged;
  for (const KeyedIndex& item : order) {
    const Pull& pull = pulls[static_cast<size_t>(item.index)];
    if (!merged.empty() && merged.back().content == pull.content && merged.back().slot == pull.slot) {
      merged.back().tokens += pull.tokens;
    } else {
      merged.push_back(pull);
    }
  }
  pulls.swap(merged);
}

class HomeAssignment {
 public:
  HomeAssignment(const PlanInput& input, std::span<Placement> placements) : input_(input), placements_(placements) {}

  void run() {
    for (int32_t replica = 0; replica < input_.topology.num_replicas(); ++replica) assign_bags(replica);
    assign_groups();
    assign_equal_sequences();
  }

 private:
  /// Bags may trade where they have one shape and lie alike on the nodes.
  bool alike(const Bag& a, const Bag& b) const {
    const int32_t node = input_.cluster.ranks_per_node;
    return a.shape == b.shape && a.first_rank.value % node == b.first_rank.value % node;
  }
  bool alike_shifted(const Bag& a, const Bag& b) const {
    // A bag inside one node lies like any other inside one node.
    const auto inside = [&](const Bag& bag) {
      return input_.cluster.same_node(bag.first_rank, Rank(bag.first_rank.value + bag.num_ranks - 1));
    };
    return alike(a, b) || (a.shape == b.shape && inside(a) && inside(b));
  }

  void assign_bags(int32_t replica) {
    const Topology& topology = input_.topology;
    const int32_t first_bag = replica * topology.num_bags_per_replica();
    const auto num_bags = static_cast<size_t>(topology.num_bags_per_replica());
    const auto bags = topology.bags().subspan(static_cast<size_t>(first_bag), num_bags);
    const SequenceId first = input_.seq_lens.first_of(bags.front().first_rank);
    const SequenceId last = input_.seq_lens.last_of(Rank(bags.back().first_rank.value + bags.back().num_ranks - 1));
    // Classes of bags that may trade; usually one.
    std::vector<int32_t> class_of(num_bags, -1), example;
    for (size_t b = 0; b < num_bags; ++b) {
      for (size_t c = 0; c < example.size() && class_of[b] < 0; ++c) {
        if (alike_shifted(bags[b], bags[static_cast<size_t>(example[c])])) class_of[b] = static_cast<int32_t>(c);
      }
      if (class_of[b] < 0) {
        class_of[b] = static_cast<int32_t>(example.size());
        example.push_back(static_cast<int32_t>(b));
      }
    }
    std::vector<int32_t> slot_of(num_bags);
    for (size_t b = 0; b < num_bags; ++b) slot_of[b] = static_cast<int32_t>(b);
    for (size_t c = 0; c < example.size(); ++c) {
      std::vector<int32_t> members, index(num_bags, -1);
      for (size_t b = 0; b < num_bags; ++b) {
        if (class_of[b] != static_cast<int32_t>(c)) continue;
        index[b] = static_cast<int32_t>(members.size());
        members.push_back(static_cast<int32_t>(b));
      }
      if (members.size() < 2) continue;
      std::vector<Pull> pulls;
      for (int32_t s = first.value; s < last.value; ++s) {
        const SequenceId id(s);
        const int32_t content = index[placements_[id.index()].bag.index() - static_cast<size_t>(first_bag)];
        if (content < 0) continue;
        const Rank home = input_.seq_lens.home_of(id);
        const auto home_bag = static_cast<int32_t>(topology.bag_of(home).index()) - first_bag;
        // Twice for its bag, once for the other bags of its node.
        if (bags[static_cast<size_t>(home_bag)].num_ranks >= input_.cluster.ranks_per_node) {
          add_pull(pulls, content, index, home_bag, home_bag, id);
          continue;
        }
        for (int32_t b = home_bag; b >= 0 && touches_node(bags[static_cast<size_t>(b)], home); --b)
          add_pull(pulls, content, index, b, home_bag, id);
        for (auto b = static_cast<size_t>(home_bag) + 1; b < num_bags && touches_node(bags[b], home); ++b) {
          add_pull(pulls, content, index, static_cast<int32_t>(b), home_bag, id);
        }
      }
      merge(pulls);
      std::vector<int32_t> chosen(members.size(), -1);
      match(pulls, chosen, taken_);
      for (size_t m = 0; m < members.size(); ++m)
        slot_of[static_cast<size_t>(members[m])] = members[static_cast<size_t>(chosen[m])];
    }
    for (int32_t s = first.value; s < last.value; ++s) {
      Placement& place = placements_[static_cast<size_t>(s)];
      const auto from = place.bag.index() - static_cast<size_t>(first_bag);
      const auto to = static_cast<size_t>(slot_of[from]);
      place.first_rank = Rank(place.first_rank.value - bags[from].first_rank.value + bags[to].first_rank.value);
      place.bag = BagId(first_bag + static_cast<int32_t>(to));
    }
  }

  bool touches_node(const Bag& bag, Rank home) const {
    const int32_t node = input_.cluster.ranks_per_node, first = home.value / node * node;
    return bag.first_rank.value < first + node && bag.first_rank.value + bag.num_ranks > first;
  }
  void add_pull(std::vector<Pull>& pulls, int32_t content, const std::vector<int32_t>& index, int32_t bag,
                int32_t home_bag, SequenceId id) {
    const int32_t slot = index[static_cast<size_t>(bag)];
    if (slot >= 0)
      pulls.push_back({.tokens = input_.seq_lens[id] * (bag == home_bag ? 2 : 1), .content = content, .slot = slot});
  }

  /// Within each bag, from the largest groups down: the parts of a group trade places.
  void assign_groups() {
    std::vector<std::vector<int32_t>> ids_of_bag(input_.topology.bags().size());
    for (size_t s = 0; s < placements_.size(); ++s)
      ids_of_bag[placements_[s].bag.index()].push_back(static_cast<int32_t>(s));
    for (size_t b = 0; b < ids_of_bag.size(); ++b) {
      const Bag& bag = input_.topology.bag(BagId(b));
      if (!input_.cluster.same_node(bag.first_rank, Rank(bag.first_rank.value + bag.num_ranks - 1))) continue;
      const auto& degrees = input_.topology.shapes()[static_cast<size_t>(bag.shape)].degrees;
      for (size_t k = degrees.size() - 1; k > 0; --k) trade_parts(bag, degrees[k], degrees[k - 1], ids_of_bag[b]);
    }
  }

  /// In each group of `degree` ranks of the bag, its parts trade places.
  void trade_parts(const Bag& bag, int32_t degree, int32_t part, std::span<const int32_t> ids) {
    const int32_t num_groups = bag.num_ranks / degree, num_parts = degree / part;
    // Tokens at home, by group, content and slot.
    tokens_.assign(static_cast<size_t>(num_groups * num_parts * num_parts), 0);
    for (const int32_t s : ids) {
      const Placement& place = placements_[static_cast<size_t>(s)];
      const int32_t offset = place.first_rank.value - bag.first_rank.value;
      const int32_t home = input_.seq_lens.home_of(SequenceId(s)).value - bag.first_rank.value;
      if (place.degree > part || home < 0 || home >= bag.num_ranks || home / degree != offset / degree) continue;
      const int32_t content = offset / part, slot = home / part % num_parts;  // content counted through the groups
      tokens_[static_cast<size_t>(content * num_parts + slot)] += input_.seq_lens[SequenceId(s)] / place.degree;
    }
    slots_.assign(static_cast<size_t>(num_groups * num_parts), -1);
    for (int32_t group = 0; group < num_groups; ++group) {
      pulls_.clear();
      for (int32_t content = 0; content < num_parts; ++content) {
        for (int32_t slot = 0; slot < num_parts; ++slot) {
          const int64_t tokens = tokens_[static_cast<size_t>((group * num_parts + content) * num_parts + slot)];
          if (tokens > 0) pulls_.push_back({.tokens = tokens, .content = content, .slot = slot});
        }
      }
      match(pulls_, std::span(slots_).subspan(static_cast<size_t>(group * num_parts), static_cast<size_t>(num_parts)),
            taken_);
    }
    for (const int32_t s : ids) {
      Placement& place = placements_[static_cast<size_t>(s)];
      if (place.degree > part) continue;
      const int32_t content = (place.first_rank.value - bag.first_rank.value) / part;
      place.first_rank =
          Rank(place.first_rank.value + (slots_[static_cast<size_t>(content)] - content % num_parts) * part);
    }
  }

  int64_t pairs_of(int32_t s) const {
    return input_.attention_pairs.empty() ? 0 : input_.attention_pairs[static_cast<size_t>(s)];
  }

  /// Sequences of equal length and mask trade places: first those that come home by it, then those that come into their
  /// node.
  void assign_equal_sequences() {
    for (int32_t replica = 0; replica < input_.topology.num_replicas(); ++replica) {
      const int32_t num_ranks = input_.topology.num_ranks_per_replica();
      const SequenceId first = input_.seq_lens.first_of(Rank(replica * num_ranks));
      const SequenceId last = input_.seq_lens.last_of(Rank((replica + 1) * num_ranks - 1));
      std::vector<KeyedIndex> order;
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
    const auto by_rank = [](const Placement& a, const Placement& b) {
      return std::tie(a.first_rank, a.degree) < std::tie(b.first_rank, b.degree);
    };
    std::vector<Placement>& places = places_;
    std::vector<char>&used = used_, &done = done_;
    places.clear();
    for (const int32_t s : ids) places.push_back(placements_[static_cast<size_t>(s)]);
    std::sort(places.begin(), places.end(), by_rank);
    used.assign(places.size(), 0);
    done.assign(ids.size(), 0);
    const auto take = [&](size_t i, size_t p) {
      placements_[static_cast<size_t>(ids[i])] = places[p];
      used[p] = done[i] = 1;
    };
    // Home: a group of some degree that holds the home rank.
    for (size_t i = 0; i < ids.size(); ++i) {
      const Rank home = input_.seq_lens.home_of(SequenceId(ids[i]));
      const Bag& bag = input_.topology.bag(input_.topology.bag_of(home));
      for (const int32_t degree : input_.topology.shapes()[static_cast<size_t>(bag.shape)].degrees) {
        const Placement wanted{.bag = input_.topology.bag_of(home),
                               .first_rank = Rank(home.value - (home.value - bag.first_rank.value) % degree),
                               .degree = degree};
        auto p = static_cast<size_t>(std::lower_bound(places.begin(), places.end(), wanted, by_rank) - places.begin());
        while (p < places.size() && places[p] == wanted && used[p]) ++p;
        if (p < places.size() && places[p] == wanted) {
          take(i, p);
          break;
        }
      }
    }
    // Then the node, then what is left. Both lists are in rank order, so one pass over each suffices.
    for (const bool in_node : {true, false}) {
      size_t p = 0;
      for (size_t i = 0; i < ids.size(); ++i) {
        if (done[i]) continue;
        const int32_t node = input_.seq_lens.home_of(SequenceId(ids[i])).value / input_.cluster.ranks_per_node;
        const auto node_of = [&](size_t q) { return places[q].first_rank.value / input_.cluster.ranks_per_node; };
        while (p < places.size() && (used[p] || (in_node && node_of(p) < node))) ++p;
        if (p == places.size()) break;
        if (!in_node || node_of(p) == node) take(i, p);
      }
    }
  }

  const PlanInput& input_;
  std::span<Placement> placements_;
  std::vector<char> taken_;
  std::vector<int64_t> tokens_;
  std::vector<int32_t> slots_;
  std::vector<Pull> pulls_;
  std::vector<Placement> places_;  // of sequences that trade
  std::vector<char> used_, done_;
};

}  // namespace

void assign_homes(const PlanInput& input, std::span<Placement> placements) {
  if (!input.rank_speed.empty() || placements.empty()) return;
  HomeAssignment(input, placements).run();
}

}  // namespace knapformer
