#include "knapformer/core/home_assignment.h"

#include <algorithm>
#include <limits>
#include <map>
#include <tuple>
#include <vector>

#include "knapformer/core/radix_sort.h"

namespace knapformer {
namespace {

/// So many tokens of a content would be at home in `slot`; or, where slots are nodes, in that node.
struct Pull {
  int64_t tokens = 0;
  int32_t slot = 0;
  int32_t content = 0;
};

/// What one rank of those that share a sequence holds of it, where it is cut evenly.
int64_t share_of(const PlanInput& input, SequenceId id, const Placement& place) {
  const int64_t length = input.seq_lens[id];
  return place.degree == 1 ? length : length / place.degree;
}

/// The blocks of one degree: the aligned groups of so many ranks in the bags that allow it. Block i holds content i,
/// and contents trade slots where the keys are equal.
struct Blocks {
  std::vector<int32_t> first_rank;
  std::vector<int32_t> node;  // -1 where a block lies on several, or all it may trade with on the same
  std::vector<uint64_t> key;
  std::vector<int32_t> of_rank;  // by rank; -1: none

  int32_t count() const { return static_cast<int32_t>(first_rank.size()); }
  bool may_trade(int32_t a, int32_t b) const { return key[static_cast<size_t>(a)] == key[static_cast<size_t>(b)]; }
};

/// A sorted list whose runs of equal elements are used up from their front.
template <typename T>
class SortedPool {
 public:
  template <typename Less>
  void assign(std::span<const T> items, Less less) {
    items_.assign(items.begin(), items.end());
    if (!std::is_sorted(items_.begin(), items_.end(), less)) std::stable_sort(items_.begin(), items_.end(), less);
    num_used_.assign(items_.size(), 0);
  }
  std::span<const T> items() const { return items_; }
  /// The index of an element equal to `wanted` that was not taken before, or -1.
  template <typename Less>
  std::ptrdiff_t take(const T& wanted, Less less) {
    const auto first =
        static_cast<size_t>(std::lower_bound(items_.begin(), items_.end(), wanted, less) - items_.begin());
    if (first == items_.size() || less(wanted, items_[first])) return -1;
    const size_t next = first + num_used_[first];
    if (next == items_.size() || less(wanted, items_[next])) return -1;
    ++num_used_[first];
    return static_cast<std::ptrdiff_t>(next);
  }

 private:
  std::vector<T> items_;
  std::vector<uint32_t> num_used_;  // at the first of each run
};

/// Finds a slot for each content: where most of its tokens are at home, else in their node.
class Matching {
 public:
  Matching(const PlanInput& input, std::span<const Placement> placements, const Blocks& blocks, int32_t degree)
      : input_(input), blocks_(blocks), num_(static_cast<size_t>(blocks.count())) {
    // Sequences by content; within one in their order, so by rising home.
    first_id_.assign(num_ + 1, 0);
    const auto content_of = [&](size_t s) {
      return placements[s].degree > degree ? -1 : blocks.of_rank[placements[s].first_rank.index()];
    };
    for (size_t s = 0; s < placements.size(); ++s) {
      if (const int32_t c = content_of(s); c >= 0) ++first_id_[static_cast<size_t>(c) + 1];
    }
    for (size_t c = 0; c < num_; ++c) first_id_[c + 1] += first_id_[c];
    items_.resize(static_cast<size_t>(first_id_.back()));
    std::vector<int32_t> cursor(first_id_.begin(), first_id_.end() - 1);
    for (size_t s = 0; s < placements.size(); ++s) {
      const int32_t c = content_of(s);
      if (c < 0) continue;
      const SequenceId id(s);
      // Of a shared sequence at most its share can be at home.
      items_[static_cast<size_t>(cursor[static_cast<size_t>(c)]++)] = {
          .tokens = share_of(input, id, placements[s]), .slot = input.seq_lens.home_of(id).value, .content = c};
    }
  }

  /// The slot of each content.
  const std::vector<int32_t>& run() {
    find_pulls();
    slot_of_.assign(num_, -1);
    content_of_.assign(num_, -1);
    pull_home();
    pull_into_node();
    place_rest();
    int64_t now = 0, before = 0;
    for (int32_t c = 0; c < blocks_.count(); ++c) {
      now += tokens_home(c, slot_of_[static_cast<size_t>(c)]);
      before += tokens_home(c, c);
    }
    if (before >= now && before > 0) {
      for (size_t c = 0; c < num_; ++c) slot_of_[c] = content_of_[c] = static_cast<int32_t>(c);
    }
    exchange_pairs();
    solve_few();
    return slot_of_;
  }

 private:
  void set(int32_t content, int32_t slot) {
    slot_of_[static_cast<size_t>(content)] = slot;
    content_of_[static_cast<size_t>(slot)] = content;
  }
  bool is_placed(int32_t content) const { return slot_of_[static_cast<size_t>(content)] >= 0; }
  bool is_taken(int32_t slot) const { return content_of_[static_cast<size_t>(slot)] >= 0; }

  /// What pulls each content home, by rising slot.
  void find_pulls() {
    first_pull_.assign(num_ + 1, 0);
    pulls_.reserve(items_.size());
    for (int32_t c = 0; c < blocks_.count(); ++c) {
      for (const Pull& item : items_of(c)) {
        const int32_t slot = blocks_.of_rank[static_cast<size_t>(item.slot)];
        if (slot < 0 || item.tokens == 0 || !blocks_.may_trade(c, slot)) continue;
        add(pulls_, first_pull_[static_cast<size_t>(c)], {.tokens = item.tokens, .slot = slot, .content = c});
      }
      first_pull_[static_cast<size_t>(c) + 1] = pulls_.size();
    }
  }
  std::span<const Pull> items_of(int32_t content) const {
    const auto first = static_cast<size_t>(first_id_[static_cast<size_t>(content)]);
    return std::span(items_).subspan(first, static_cast<size_t>(first_id_[static_cast<size_t>(content) + 1]) - first);
  }
  std::span<const Pull> pulls_of(int32_t content) const {
    const size_t first = first_pull_[static_cast<size_t>(content)];
    return std::span(pulls_).subspan(first, first_pull_[static_cast<size_t>(content) + 1] - first);
  }
  /// Slots come in order, so equal ones meet.
  static void add(std::vector<Pull>& pulls, size_t first, const Pull& pull) {
    if (pulls.size() > first && pulls.back().slot == pull.slot) {
      pulls.back().tokens += pull.tokens;
    } else {
      pulls.push_back(pull);
    }
  }
  int64_t tokens_home(int32_t content, int32_t slot) const {
    const auto pulls = pulls_of(content);
    const auto it = std::lower_bound(pulls.begin(), pulls.end(), slot,
                                     [](const Pull& pull, int32_t value) { return pull.slot < value; });
    return it != pulls.end() && it->slot == slot ? it->tokens : 0;
  }

  /// Strongest pulls first; of equal ones those that come first.
  template <typename Use>
  static void strongest_first(std::span<const Pull> pulls, Use use) {
    std::vector<KeyedIndex> order(pulls.size());
    for (size_t i = 0; i < pulls.size(); ++i)
      order[i] = {.key = ~static_cast<uint64_t>(pulls[i].tokens), .index = static_cast<int32_t>(i)};
    sort_by_key(order);
    for (const KeyedIndex& item : order) {
      const Pull& pull = pulls[static_cast<size_t>(item.index)];
      use(pull.content, pull.slot);
    }
  }

  void pull_home() {
    strongest_first(pulls_, [&](int32_t c, int32_t slot) {
      if (!is_placed(c) && !is_taken(slot)) set(c, slot);
    });
  }

  /// A slot that is still free.
  struct Free {
    uint64_t key = 0;
    int32_t node = 0;
    int32_t slot = 0;

    std::pair<uint64_t, int32_t> where() const { return {key, node}; }
  };
  std::vector<Free> free_slots(bool by_node) const {
    std::vector<Free> slots;
    for (int32_t s = 0; s < blocks_.count(); ++s) {
      const auto i = static_cast<size_t>(s);
      if (!is_taken(s)) slots.push_back({.key = blocks_.key[i], .node = by_node ? blocks_.node[i] : 0, .slot = s});
    }
    return slots;
  }
  static bool less(const Free& a, const Free& b) { return a.where() < b.where(); }

  void pull_into_node() {
    std::vector<Pull> pulls;
    for (int32_t c = 0; c < blocks_.count(); ++c) {
      if (is_placed(c) || blocks_.node[static_cast<size_t>(c)] < 0) continue;
      const size_t first = pulls.size();
      for (const Pull& item : items_of(c))
        add(pulls, first, {.tokens = item.tokens, .slot = item.slot / input_.cluster.ranks_per_node, .content = c});
    }
    if (pulls.empty()) return;
    SortedPool<Free> pool;
    pool.assign(free_slots(true), less);
    strongest_first(pulls, [&](int32_t c, int32_t node) {
      if (is_placed(c)) return;
      const auto found = pool.take({.key = blocks_.key[static_cast<size_t>(c)], .node = node}, less);
      if (found >= 0) set(c, pool.items()[static_cast<size_t>(found)].slot);
    });
  }

  /// Those that nothing pulls stay where they are if they can.
  void place_rest() {
    for (int32_t c = 0; c < blocks_.count(); ++c) {
      if (!is_placed(c) && !is_taken(c)) set(c, c);
    }
    SortedPool<Free> pool;
    pool.assign(free_slots(false), less);
    for (int32_t c = 0; c < blocks_.count(); ++c) {
      if (is_placed(c)) continue;
      const auto found = pool.take({.key = blocks_.key[static_cast<size_t>(c)]}, less);
      set(c, pool.items()[static_cast<size_t>(found)].slot);
    }
  }

  /// Two contents swap slots while that brings more tokens home.
  void exchange_pairs() {
    constexpr int32_t kMostRounds = 4;
    std::vector<int64_t> here(num_);
    for (int32_t c = 0; c < blocks_.count(); ++c)
      here[static_cast<size_t>(c)] = tokens_home(c, slot_of_[static_cast<size_t>(c)]);
    bool improved = true;
    for (int32_t round = 0; improved && round < kMostRounds; ++round) {
      improved = false;
      for (int32_t c = 0; c < blocks_.count(); ++c) {
        int64_t& mine = here[static_cast<size_t>(c)];
        for (const Pull& pull : pulls_of(c)) {
          if (pull.tokens <= mine) continue;  // one of the two must gain, and each has its turn
          const int32_t other = content_of_[static_cast<size_t>(pull.slot)], slot = slot_of_[static_cast<size_t>(c)];
          if (other == c) continue;
          int64_t& theirs = here[static_cast<size_t>(other)];
          const int64_t theirs_then = tokens_home(other, slot);
          if (pull.tokens + theirs_then <= mine + theirs) continue;
          set(c, pull.slot);
          set(other, slot);
          mine = pull.tokens;
          theirs = theirs_then;
          improved = true;
        }
      }
    }
  }

  /// Where few may trade with each other, the best assignment of all (pairs are exchanged already).
  void solve_few() {
    constexpr size_t kLeast = 3, kMost = 16;
    std::vector<KeyedIndex> order(num_);
    for (size_t c = 0; c < num_; ++c) order[c] = {.key = blocks_.key[c], .index = static_cast<int32_t>(c)};
    if (!std::ranges::is_sorted(order, {}, &KeyedIndex::key)) sort_by_key(order);
    std::vector<int32_t> members;
    for (size_t i = 0, j; i < num_; i = j) {
      for (j = i + 1; j < num_ && order[j].key == order[i].key;) ++j;
      if (j - i < kLeast || j - i > kMost) continue;
      members.clear();
      for (size_t k = i; k < j; ++k) members.push_back(order[k].index);
      solve(members);
    }
  }

  /// The Hungarian method, one content after another along shortest augmenting paths (Kuhn, 1955; Jonker and
  /// Volgenant, 1987): O(n^3). Element 0 of the columns is where a path starts.
  void solve(std::span<const int32_t> members) {
    const size_t n = members.size();
    const auto cost = [&](size_t row, size_t column) { return -tokens_home(members[row - 1], members[column - 1]); };
    std::vector<int64_t> row_price(n + 1, 0), column_price(n + 1, 0), slack(n + 1);
    std::vector<size_t> row_of(n + 1, 0), previous(n + 1);
    std::vector<char> reached(n + 1);
    for (size_t row = 1; row <= n; ++row) {
      row_of[0] = row;
      std::ranges::fill(slack, std::numeric_limits<int64_t>::max());
      std::ranges::fill(reached, 0);
      size_t column = 0;
      do {
        reached[column] = 1;
        size_t nearest = 0;
        for (size_t k = 1; k <= n; ++k) {
          if (reached[k]) continue;
          const int64_t left = cost(row_of[column], k) - row_price[row_of[column]] - column_price[k];
          if (left < slack[k]) slack[k] = left, previous[k] = column;
          if (nearest == 0 || slack[k] < slack[nearest]) nearest = k;
        }
        const int64_t step = slack[nearest];
        for (size_t k = 0; k <= n; ++k) {
          if (reached[k]) {
            row_price[row_of[k]] += step;
            column_price[k] -= step;
          } else {
            slack[k] -= step;
          }
        }
        column = nearest;
      } while (row_of[column] != 0);
      for (; column != 0; column = previous[column]) row_of[column] = row_of[previous[column]];
    }
    int64_t gain = 0;
    for (size_t k = 1; k <= n; ++k) {
      const int32_t content = members[row_of[k] - 1];
      gain += tokens_home(content, members[k - 1]) - tokens_home(content, slot_of_[static_cast<size_t>(content)]);
    }
    if (gain <= 0) return;  // as good already, and chosen with an eye to nodes
    for (size_t k = 1; k <= n; ++k) set(members[row_of[k] - 1], members[k - 1]);
  }

  const PlanInput& input_;
  const Blocks& blocks_;
  size_t num_;
  std::vector<Pull> items_;  // sequences by content: share, home rank
  std::vector<int32_t> first_id_;
  std::vector<Pull> pulls_;
  std::vector<size_t> first_pull_;
  std::vector<int32_t> slot_of_, content_of_;
};

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
    Matching matching(input_, placements_, blocks, degree);
    const std::vector<int32_t>& slot_of = matching.run();
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
    places_.clear();
    int32_t least_degree = std::numeric_limits<int32_t>::max(), most_degree = 0;
    for (const int32_t s : ids) {
      const Placement& place = placements_[static_cast<size_t>(s)];
      places_.push_back(place);
      least_degree = std::min(least_degree, place.degree);
      most_degree = std::max(most_degree, place.degree);
    }
    pool_.assign(places_, by_rank);
    const std::span<const Placement> places = pool_.items();
    std::vector<char>&used = used_, &done = done_;
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
        if (degree < least_degree || degree > most_degree) continue;
        const Rank first(home.value - (home.value - bag.first_rank.value) % degree);
        const auto p =
            pool_.take({.bag = input_.topology.bag_of(home), .first_rank = first, .degree = degree}, by_rank);
        if (p < 0) continue;
        take(i, static_cast<size_t>(p));
        break;
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
  std::vector<int32_t> context_;  // by rank: the smallest group so far that shares a sequence there; else the replica
  int32_t num_contexts_ = 0;
  std::vector<Placement> places_;
  SortedPool<Placement> pool_;
  std::vector<char> used_, done_;
};

/// Tokens that stay, where shared sequences are cut evenly.
int64_t tokens_home(const PlanInput& input, std::span<const Placement> placements) {
  int64_t tokens = 0;
  for (size_t s = 0; s < placements.size(); ++s) {
    const SequenceId id(s);
    const int32_t offset = input.seq_lens.home_of(id).value - placements[s].first_rank.value;
    if (offset >= 0 && offset < placements[s].degree) tokens += share_of(input, id, placements[s]);
  }
  return tokens;
}

}  // namespace

void assign_homes(const PlanInput& input, std::span<Placement> placements) {
  if (placements.empty()) return;
  std::vector<Placement> trial(placements.begin(), placements.end());
  HomeAssignment(input, trial).run();
  // A larger block goes where most of its tokens are at home, and those may have been at home in it already.
  if (tokens_home(input, trial) > tokens_home(input, placements)) std::ranges::copy(trial, placements.begin());
}

}  // namespace knapformer
