#include "knapformer/core/planners/balanced/anneal.h"

#include <algorithm>
#include <bit>
#include <optional>

#include "knapformer/core/util/error.h"
#include "knapformer/core/util/interrupt.h"
#include "knapformer/core/util/random.h"
#include "knapformer/core/util/winner_tree.h"

namespace knapformer {
namespace {

/// The degrees that an item may take, as indices into trees.degrees().
struct DegreeRange {
  int32_t first = 0;
  int32_t last = 0;
};

class Search {
 public:
  /// shares_least: whether items stay in the smallest groups that they fit into.
  Search(PlacementTrees& trees, std::vector<int32_t>& node_of_item, const SearchOptions& options, bool shares_least)
      : trees_(trees),
        node_(node_of_item),
        options_(options),
        random_(options.key),
        slowest_bag_(static_cast<size_t>(trees.num_bags())) {
    for (int32_t bag = 0; bag < trees.num_bags(); ++bag) refresh(bag);
    const auto items = trees.items();
    items_of_bag_.resize(static_cast<size_t>(trees.num_bags()));
    position_.resize(items.size());
    for (size_t i = 0; i < items.size(); ++i) insert(static_cast<int32_t>(i), bag_of(static_cast<int32_t>(i)));
    find_ranges(shares_least);
  }

  void run() {
    double best = slowest_time();
    std::vector<int32_t> best_node = node_;
    double temperature = options_.first_temperature;
    // The temperature halves after equal numbers of moves, down to the last one. Another constant factor would have to
    // come from roots, which need libm.
    constexpr double kLastTemperature = 0.0005;
    const auto halvings = static_cast<int64_t>(std::bit_width(static_cast<uint64_t>(temperature / kLastTemperature)));
    const int64_t moves_per_halving = options_.num_moves / std::max<int64_t>(halvings, 1) + 1;
    constexpr int64_t kMovesPerCheck = 65536;  // tens of milliseconds
    for (int64_t move = 0; move < options_.num_moves; ++move) {
      if (move % kMovesPerCheck == kMovesPerCheck - 1) check_interrupt();
      if (move > 0 && move % moves_per_halving == 0) temperature /= 2;
      const std::optional<Change> change = propose();
      if (!change || !is_kept(*change, temperature * random_.exponential())) continue;
      commit(*change);
      if (slowest_time() < best) {
        best = slowest_time();
        best_node = node_;
        if (best <= options_.good_enough) break;
      }
    }
    node_ = std::move(best_node);
    trees_.put(node_);
  }

 private:
  double slowest_time() const { return -slowest_bag_.min(); }
  void refresh(int32_t bag) { slowest_bag_.set(bag, -trees_.bag_time(bag)); }
  int32_t bag_of(int32_t item) const { return trees_.node(node_[item]).bag; }

  void insert(int32_t item, int32_t bag) {
    auto& list = items_of_bag_[bag];
    position_[item] = static_cast<int32_t>(list.size());
    list.push_back(item);
  }
  void erase(int32_t item, int32_t bag) {
    auto& list = items_of_bag_[bag];
    const int32_t last = list.back(), position = position_[item];
    list[position] = last;
    position_[last] = position;
    list.pop_back();
  }

  /// From the smallest degree with which the item fits into the present time, up to the first degree that makes its
  /// share small: sharing beyond that only costs. A limit of tokens may need any larger degree.
  void find_ranges(bool shares_least) {
    constexpr double kSmallShare = 0.1;  // half or double: up to 0.6 % slower on slow links, elsewhere 0.1 % either way
    const auto items = trees_.items();
    const auto degrees = trees_.degrees();
    std::vector<int32_t> fastest(degrees.size(), -1);
    for (int32_t v = 0; v < trees_.num_nodes(); ++v) {
      const auto k = static_cast<size_t>(std::lower_bound(degrees.begin(), degrees.end(), trees_.node(v).degree) -
                                         degrees.begin());
      if (fastest[k] < 0 || trees_.node(v).load_per_token < trees_.node(fastest[k]).load_per_token) fastest[k] = v;
    }
    const double limit = slowest_time();
    const bool is_limited = trees_.enforces_limit();
    ranges_.resize(items.size());
    for (size_t i = 0; i < items.size(); ++i) {
      size_t first = 0;
      while (first + 1 < degrees.size() && trees_.cost(items[i], fastest[first]) > limit) ++first;
      size_t last = first;
      while (last + 1 < degrees.size() && (is_limited || trees_.cost(items[i], fastest[last]) > kSmallShare)) ++last;
      if (shares_least && !is_limited) last = first;
      ranges_[i] = {.first = static_cast<int32_t>(first), .last = static_cast<int32_t>(last)};
    }
  }

  bool allows(int32_t item, int32_t degree) const {
    const DegreeRange range = ranges_[item];
    const auto degrees = trees_.degrees();
    return degree >= degrees[range.first] && degree <= degrees[range.last];
  }

  int32_t random_node(int32_t item, int32_t bag) {
    const DegreeRange range = ranges_[item];
    const int32_t k = range.first + random_.below(range.last - range.first + 1);
    const auto [first, last] = trees_.nodes_of(bag, trees_.degrees()[k]);
    return first == last ? -1 : first + random_.below(last - first);
  }

  double energy_of(int32_t bag) const { return trees_.state(trees_.root(bag)).energy; }

  int32_t random_item() {
    if (random_.below(2) == 0) {
      const auto& list = items_of_bag_[slowest_bag_.winner()];
      if (!list.empty()) return list[random_.below(static_cast<int32_t>(list.size()))];
    }
    return random_.below(static_cast<int32_t>(node_.size()));
  }

  /// An item goes to another node; or two are exchanged.
  struct Change {
    int32_t a, b;                        // b: -1 where a is moved alone
    int32_t from, to, from_bag, to_bag;  // of a; b's are the other way round

    bool in_one_bag() const { return from_bag == to_bag; }
  };

  std::optional<Change> propose() {
    const int32_t a = random_item();
    const int32_t from = node_[a], from_bag = bag_of(a);
    int32_t to_bag = from_bag, b = -1;  // where two items are exchanged, the other one
    const int32_t kind = random_.below(4);
    if (kind == 3) {                // of about the same work: items come by descending work
      constexpr int32_t kNear = 8;  // half or double: up to 2 % slower on slow links, elsewhere 0.1 %
      const int32_t offset = random_.below(2 * kNear);
      b = a + (offset < kNear ? offset - kNear : offset - kNear + 1);
      if (b < 0 || b >= static_cast<int32_t>(node_.size())) return std::nullopt;
      to_bag = bag_of(b);
    } else if (trees_.num_bags() > 1 && random_.below(4) != 0) {
      to_bag = random_.below(trees_.num_bags());
    }
    if (kind == 2) {
      const auto& list = items_of_bag_[to_bag];
      if (list.empty()) return std::nullopt;
      b = list[random_.below(static_cast<int32_t>(list.size()))];
    }
    const int32_t to = b < 0 ? random_node(a, to_bag) : node_[b];
    if (to < 0 || to == from) return std::nullopt;
    if (b >= 0 && (!allows(a, trees_.node(to).degree) || !allows(b, trees_.node(from).degree))) return std::nullopt;
    return Change{.a = a, .b = b, .from = from, .to = to, .from_bag = from_bag, .to_bag = to_bag};
  }

  /// Makes the change in the trees, unless it raises the energy by `allowed` or more.
  bool is_kept(const Change& change, double allowed) {
    const int32_t a = change.a, b = change.b, from = change.from, to = change.to;
    const auto items = trees_.items();
    const auto energy = [&] {
      return energy_of(change.from_bag) + (change.in_one_bag() ? 0 : energy_of(change.to_bag));
    };
    const double before = energy();
    // Most changes overfill the node that gets more by far. That is mostly seen before anything is changed.
    const bool to_gets_more = b < 0 || items[a].attention >= items[b].attention;
    TreeItem more = items[to_gets_more ? a : b];
    if (b >= 0) {
      more.tokens -= items[to_gets_more ? b : a].tokens;
      more.attention -= items[to_gets_more ? b : a].attention;
    }
    const double least = to_gets_more ? trees_.least_energy(more, to, from) : trees_.least_energy(more, from, to);
    constexpr double kRounding = 1e-9;
    if (least * (1 - kRounding) - before * (1 + kRounding) > allowed) return false;
    trees_.save(from, to, paths_);
    const auto exchange = [&](int32_t v, int32_t gives, int32_t gets) {
      if (gives >= 0) trees_.remove(items[gives], v);
      if (gets >= 0) trees_.add(items[gets], v);
    };
    exchange(from, a, b);
    exchange(to, b, a);
    trees_.update(paths_);
    const double after = energy();
    if (after <= before || after - before < allowed) return true;
    trees_.restore(paths_);
    return false;
  }

  void commit(const Change& change) {
    const auto [a, b, from, to, from_bag, to_bag] = change;
    node_[a] = to;
    if (b >= 0) node_[b] = from;
    if (!change.in_one_bag()) {
      erase(a, from_bag);
      insert(a, to_bag);
      if (b >= 0) {
        erase(b, to_bag);
        insert(b, from_bag);
      }
    }
    refresh(from_bag);
    refresh(to_bag);
  }

  PlacementTrees& trees_;
  std::vector<int32_t>& node_;
  SearchOptions options_;
  Random random_;
  WinnerTree slowest_bag_;  // by bag, its time, negated
  std::vector<std::vector<int32_t>> items_of_bag_;
  std::vector<int32_t> position_;  // of an item in its bag's list
  std::vector<DegreeRange> ranges_;
  PlacementTrees::Paths paths_;  // of the nodes that a step changes
};

}  // namespace

void improve(PlacementTrees& trees, std::vector<int32_t>& node_of_item, const SearchOptions& options) {
  // Half or double: up to 2 % slower on slow links, elsewhere 0.3 % either way.
  constexpr double kRangeOverGain = 3, kMinGain = 5e-4;  // half or double of the latter: the same
  trees.put(node_of_item);
  SearchOptions of_round = options;
  for (const bool shares_least : {true, false}) {
    if (shares_least && !options.shares_least_first) continue;
    const double time = trees.slowest();
    if (node_of_item.empty() || options.num_moves == 0 || time <= options.good_enough) return;
    // The floor lies so low that what remains to be gained is 1 / kRangeOverGain of the range.
    trees.set_reference(time - kRangeOverGain * std::max(time - options.bound, kMinGain), time);
    Search(trees, node_of_item, of_round, shares_least).run();
    of_round.key += uint64_t{1} << 32;
    of_round.first_temperature = SearchOptions().first_temperature;
    // With as many again planning takes 1.2 times as long, for 0.003 %. But half as many keep fewer limits of tokens.
    if (!trees.enforces_limit()) of_round.num_moves /= 2;
  }
}

uint64_t random_key(const PlanInput& input, int32_t replica) {
  const auto [first, last] = input.sequences_of(replica);
  uint64_t key = 0x6B6E6170666F726Du;
  for (int32_t s = first.value; s < last.value; ++s)
    key = (key ^ static_cast<uint64_t>(input.seq_lens[SequenceId(s)])) * Random::kGamma;
  return key;
}

}  // namespace knapformer
