#include "knapformer/core/home_matching.h"

#include <algorithm>
#include <limits>

#include "knapformer/core/radix_sort.h"
#include "knapformer/core/sorted_pool.h"

namespace knapformer {
namespace {

/// So many tokens of a content would be at home in `slot`; or, where slots are nodes, in that node.
struct Pull {
  int64_t tokens = 0;
  int32_t slot = 0;
  int32_t content = 0;
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
  std::vector<int32_t> run() {
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

}  // namespace

int64_t share_of(const PlanInput& input, SequenceId id, const Placement& place) {
  const int64_t length = input.seq_lens[id];
  return place.degree == 1 ? length : length / place.degree;
}

std::vector<int32_t> match_homes(const PlanInput& input, std::span<const Placement> placements, const Blocks& blocks,
                                 int32_t degree) {
  return Matching(input, placements, blocks, degree).run();
}

}  // namespace knapformer
