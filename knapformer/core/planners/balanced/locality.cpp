#include "knapformer/core/planners/balanced/locality.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

#include "knapformer/core/cost/step_time.h"
#include "knapformer/core/util/sort.h"
#include "knapformer/core/util/winner_tree.h"

namespace knapformer {
namespace {

/// The aligned groups of one degree. What two of them hold may be swapped where they are of one class.
struct Blocks {
  int32_t degree = 1;
  std::vector<int32_t> first_rank;
  std::vector<int32_t> class_of;
  std::vector<int32_t> of_rank;  // -1: none

  int32_t count() const { return static_cast<int32_t>(first_rank.size()); }
};

/// Tokens of a sequence on one of the ranks that share it, where it is cut evenly.
int64_t share_of(const PlanInput& input, SequenceId id, const Placement& place) {
  return input.seq_lens[id] / place.degree;
}

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

/// The last part: a route takes as long as its slowest rank, and what brings the most tokens home in all need not be
/// best for that one. So while it helps, the slowest rank swaps what it holds, or single sequences, with another rank.
///
/// Of one replica. The placements are changed in place.
class RouteSwaps {
 public:
  RouteSwaps(const PlanInput& input, std::span<Placement> placements, int32_t replica);

  /// The slowest rank's seconds for a token's byte; then how many tokens move in all.
  std::pair<double, int64_t> figures() const;

  /// Swaps while that makes the slowest rank faster and no more than `max_moved` tokens move:
  /// 1. what two blocks of one class hold: the slowest rank's, and one that holds what is at home there or that is home
  ///    to what the slowest rank holds;
  /// 2. two whole sequences of ranks that share nothing and have the same speed: one comes home to the slowest rank.
  ///    Of such ranks the one with the most work gets no other work by it, and the others no more than that.
  /// A limit of tokens counts only where it would not be kept anyway: then such ranks get no more than it by 2.
  /// The classes go with what is swapped.
  void run(std::span<Blocks> blocks, int64_t max_moved);

 private:
  struct BlockSwap {
    int64_t tokens = 0;  // of the sequence for which it is tried
    Blocks* blocks = nullptr;
    int32_t a = 0, b = 0;
  };
  /// Of a rank.
  struct Load {
    int64_t tokens = 0;
    double work = 0;  // over its speed
    bool shares = false;
  };

  void add(int32_t sequence, int32_t sign);
  /// Moves sequences by so many ranks, as far as traffic goes.
  void shift(std::span<const int32_t> sequences, int32_t by);
  void hold(std::span<const int32_t> sequences, int32_t by);
  double seconds(const Traffic& tokens) const;
  bool swap_blocks(std::span<Blocks> blocks);
  void list(const Blocks& blocks, int32_t block, std::vector<int32_t>& sequences) const;
  void find_slowest();
  void find_held();
  void find_loads();
  bool keeps_limit() const;
  bool swap_sequences(int64_t max_tokens);
  /// Moves `in_a_` by so many ranks, and `in_b_` back, if that makes the slowest rank faster.
  bool swap(int32_t distance);

  const PlanInput& input_;
  std::span<Placement> placements_;
  int32_t num_ranks_, first_rank_;
  std::vector<Traffic> traffic_;  // tokens that each rank sends, then those that it receives
  int64_t moved_ = 0, max_moved_ = 0;
  WinnerTree slowest_{1};                   // by entry of the traffic, its seconds, negated
  std::vector<std::vector<int32_t>> held_;  // by rank: sequences of which it is the first rank
  std::vector<Load> loads_;                 // by rank; of tokens and work only where nothing is shared
  double max_work_ = 0;                     // of ranks that share nothing
  int64_t swapped_left_ = 0;                // sequences that may still be tried
  std::vector<BlockSwap> block_swaps_;
  std::vector<int32_t> in_a_, in_b_, touched_;
};

RouteSwaps::RouteSwaps(const PlanInput& input, std::span<Placement> placements, int32_t replica)
    : input_(input),
      placements_(placements),
      num_ranks_(input.topology.num_ranks_per_replica()),
      first_rank_(replica * num_ranks_),
      traffic_(2 * static_cast<size_t>(num_ranks_)) {
  const auto [first, last] = input.sequences_of(replica);
  for (int32_t s = first.value; s < last.value; ++s) add(s, 1);
}

std::pair<double, int64_t> RouteSwaps::figures() const {
  double slowest_s = 0;
  for (const Traffic& traffic : traffic_) slowest_s = std::max(slowest_s, seconds(traffic));
  return {slowest_s, moved_};
}

void RouteSwaps::find_slowest() {
  std::vector<double> keys;
  for (const Traffic& traffic : traffic_) keys.push_back(-seconds(traffic));
  slowest_ = WinnerTree(keys);
}

double RouteSwaps::seconds(const Traffic& tokens) const {
  return std::max(tokens.inside / input_.cluster.node_bytes_per_s, tokens.between / input_.cluster.network_bytes_per_s);
}

void RouteSwaps::add(int32_t sequence, int32_t sign) {
  const Rank home = input_.seq_lens.home_of(SequenceId(sequence));
  const Placement& place = placements_[sequence];
  const int64_t share = sign * share_of(input_, SequenceId(sequence), place);
  for (int32_t r = place.first_rank.value; r < place.first_rank.value + place.degree; ++r) {
    if (r == home.value) continue;
    const auto link = input_.cluster.same_node(Rank(r), home) ? &Traffic::inside : &Traffic::between;
    traffic_[home.value - first_rank_].*link += static_cast<double>(share);
    traffic_[r - first_rank_ + num_ranks_].*link += static_cast<double>(share);
    moved_ += share;
  }
}

void RouteSwaps::run(std::span<Blocks> blocks, int64_t max_moved) {
  constexpr int64_t kPerSequence = 8, kNoLimit = std::numeric_limits<int64_t>::max();
  const auto [first, last] = input_.sequences_of(first_rank_ / num_ranks_);
  const int64_t num_sequences = last.value - first.value;
  max_moved_ = max_moved;
  find_slowest();
  const auto swap_all = [&](const auto& swap_one) {
    swapped_left_ = kPerSequence * num_sequences;
    while (slowest_.min() < 0 && swap_one()) {
    }
  };
  find_held();
  swap_all([&] { return swap_blocks(blocks); });
  const std::vector<Placement> before(placements_.begin() + first.value, placements_.begin() + last.value);
  find_loads();
  swap_all([&] { return swap_sequences(kNoLimit); });
  if (keeps_limit()) return;
  for (int32_t s = first.value; s < last.value; ++s) {
    add(s, -1);
    placements_[s] = before[s - first.value];
    add(s, 1);
  }
  find_slowest();
  find_held();
  find_loads();
  swap_all([&] { return swap_sequences(input_.max_tokens_per_rank); });
}

void RouteSwaps::find_held() {
  const auto [first, last] = input_.sequences_of(first_rank_ / num_ranks_);
  held_.assign(static_cast<size_t>(num_ranks_), {});
  for (int32_t s = first.value; s < last.value; ++s) held_[placements_[s].first_rank.value - first_rank_].push_back(s);
}

void RouteSwaps::find_loads() {
  const auto [first, last] = input_.sequences_of(first_rank_ / num_ranks_);
  loads_.assign(static_cast<size_t>(num_ranks_), {});
  for (int32_t s = first.value; s < last.value; ++s) {
    const int32_t begin = placements_[s].first_rank.value - first_rank_;
    for (int32_t i = begin; i < begin + placements_[s].degree; ++i) {
      loads_[i].shares |= placements_[s].degree > 1;
      loads_[i].tokens += input_.seq_lens[SequenceId(s)];
      loads_[i].work += input_.work(SequenceId(s)) / input_.speed_of(Rank(first_rank_ + i));
    }
  }
  max_work_ = 0;
  for (const Load& load : loads_) {
    if (!load.shares) max_work_ = std::max(max_work_, load.work);
  }
}

bool RouteSwaps::keeps_limit() const {
  return input_.max_tokens_per_rank == 0 || std::ranges::all_of(loads_, [&](const Load& load) {
           return load.shares || load.tokens <= input_.max_tokens_per_rank;
         });
}

bool RouteSwaps::swap_blocks(std::span<Blocks> blocks) {
  const int32_t rank = first_rank_ + slowest_.winner() % num_ranks_;
  block_swaps_.clear();
  const auto propose = [&](SequenceId id, Rank other) {
    for (Blocks& of_degree : blocks) {
      if (placements_[id.index()].degree > of_degree.degree) continue;
      const int32_t a = of_degree.of_rank[rank], b = of_degree.of_rank[other.index()];
      if (a < 0 || b < 0 || a == b || of_degree.class_of[a] != of_degree.class_of[b]) continue;
      block_swaps_.push_back({share_of(input_, id, placements_[id.index()]), &of_degree, a, b});
    }
  };
  const SequenceLengths& lengths = input_.seq_lens;
  for (SequenceId id = lengths.first_of(Rank(rank)); id < lengths.last_of(Rank(rank)); ++id.value)
    propose(id, placements_[id.index()].first_rank);
  if (slowest_.winner() >= num_ranks_) {  // by what it receives
    const Bag& bag = input_.topology.bag(input_.topology.bag_of(Rank(rank)));
    for (int32_t r = bag.first_rank.value; r <= rank; ++r) {
      for (const int32_t s : held_[r - first_rank_]) {
        if (r + placements_[s].degree > rank) propose(SequenceId(s), lengths.home_of(SequenceId(s)));
      }
    }
  }
  std::ranges::stable_sort(block_swaps_, std::greater{}, &BlockSwap::tokens);
  for (const auto& [tokens, of_degree, a, b] : block_swaps_) {
    list(*of_degree, a, in_a_);
    list(*of_degree, b, in_b_);
    if (!swap(of_degree->first_rank[b] - of_degree->first_rank[a])) continue;
    // The class of a smaller block depends on the larger sequences around it, which were swapped too.
    for (Blocks& smaller : blocks) {
      for (int32_t i = 0; smaller.degree < of_degree->degree && i < of_degree->degree; i += smaller.degree) {
        const int32_t from = smaller.of_rank[of_degree->first_rank[a] + i];
        const int32_t to = smaller.of_rank[of_degree->first_rank[b] + i];
        if (from >= 0 && to >= 0) std::swap(smaller.class_of[from], smaller.class_of[to]);
      }
    }
    return true;
  }
  return false;
}

void RouteSwaps::list(const Blocks& blocks, int32_t block, std::vector<int32_t>& sequences) const {
  sequences.clear();
  const int32_t first = blocks.first_rank[block];
  for (int32_t r = first; r < first + blocks.degree; ++r) {
    for (const int32_t s : held_[r - first_rank_]) {
      if (placements_[s].degree <= blocks.degree) sequences.push_back(s);
    }
  }
}

bool RouteSwaps::swap_sequences(int64_t max_tokens) {
  const Rank rank(first_rank_ + slowest_.winner() % num_ranks_);
  Load& here = loads_[rank.value - first_rank_];
  if (here.shares) return false;
  const SequenceLengths& lengths = input_.seq_lens;
  for (SequenceId id = lengths.first_of(rank); id < lengths.last_of(rank); ++id.value) {
    const Rank other = placements_[id.index()].first_rank;
    Load& there = loads_[other.value - first_rank_];
    if (other == rank || there.shares || input_.speed_of(other) != input_.speed_of(rank)) continue;
    for (const int32_t s : held_[rank.value - first_rank_]) {
      const SequenceId back(s);
      if (lengths.home_of(back) == rank) continue;
      const double more = (input_.work(id) - input_.work(back)) / input_.speed_of(rank);
      const int64_t more_tokens = lengths[id] - lengths[back];
      const double higher = std::max({here.work, there.work, here.work + more, there.work - more});
      if (more != 0 && higher > max_work_ * (1 - 1e-12)) continue;
      if (std::max(here.tokens + more_tokens, there.tokens - more_tokens) > max_tokens) continue;
      in_a_.assign(1, s);
      in_b_.assign(1, id.value);
      if (!swap(other.value - rank.value)) continue;
      here.work += more;
      there.work -= more;
      here.tokens += more_tokens;
      there.tokens -= more_tokens;
      return true;
    }
  }
  return false;
}

void RouteSwaps::shift(std::span<const int32_t> sequences, int32_t by) {
  for (const int32_t s : sequences) {
    add(s, -1);
    placements_[s].first_rank.value += by;
    add(s, 1);
  }
}

bool RouteSwaps::swap(int32_t distance) {
  swapped_left_ -= std::ssize(in_a_) + std::ssize(in_b_);
  if (swapped_left_ < 0) return false;
  touched_.clear();
  const auto touch = [&](int32_t s, int32_t by) {
    touched_.push_back(input_.seq_lens.home_of(SequenceId(s)).value - first_rank_);
    const int32_t first = placements_[s].first_rank.value - first_rank_ + num_ranks_;
    for (int32_t i = first; i < first + placements_[s].degree; ++i) touched_.insert(touched_.end(), {i, i + by});
  };
  for (const int32_t s : in_a_) touch(s, distance);
  for (const int32_t s : in_b_) touch(s, -distance);
  shift(in_a_, distance);
  shift(in_b_, -distance);
  double slowest = 0;
  for (const int32_t i : touched_) slowest = std::max(slowest, seconds(traffic_[i]));
  if (slowest >= -slowest_.min() * (1 - 1e-9) || moved_ > max_moved_) {
    shift(in_a_, -distance);
    shift(in_b_, distance);
    return false;
  }
  for (const int32_t i : touched_) slowest_.set(i, -seconds(traffic_[i]));
  hold(in_a_, distance);
  hold(in_b_, -distance);
  return true;
}

void RouteSwaps::hold(std::span<const int32_t> sequences, int32_t by) {
  for (const int32_t s : sequences) {
    Placement& place = placements_[s];
    place.bag = input_.topology.bag_of(place.first_rank);
    const int32_t now = place.first_rank.value - first_rank_;
    std::erase(held_[now - by], s);
    held_[now].push_back(s);
  }
}

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
