#include "knapformer/core/planners/micro_batch_packing.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "knapformer/core/util/error.h"
#include "knapformer/core/util/random.h"
#include "knapformer/core/util/winner_tree.h"

namespace knapformer {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

}  // namespace

MicroBatchPacking::MicroBatchPacking(const PlanInput& input, double bound_s)
    : bound_s_(bound_s), max_tokens_(input.max_tokens_per_rank), num_sequences_(input.seq_lens.num_sequences()) {
  key_ = 0x6D6963726F626174u;
  for (const int64_t length : input.seq_lens.lens()) key_ = (key_ ^ static_cast<uint64_t>(length)) * Random::kGamma;
  replicas_.reserve(static_cast<size_t>(input.topology.num_replicas()));
  for (int32_t r = 0; r < input.topology.num_replicas(); ++r) {
    Replica& replica = replicas_.emplace_back(PlacementTrees(input, r, Objective::kTime));
    add_leaves(replica);
    add_items(replica);
  }
}

void MicroBatchPacking::add_leaves(Replica& replica) const {
  const PlacementTrees& trees = replica.trees;
  replica.leaf_of_node.assign(static_cast<size_t>(trees.num_nodes()), -1);
  for (int32_t v = 0; v < trees.num_nodes(); ++v) {
    const PlacementTrees::Node& node = trees.node(v);
    if (node.num_children > 0) continue;
    replica.leaf_of_node[v] = static_cast<int32_t>(replica.leaves.size());
    replica.leaves.push_back(
        {.node = v,
         .time_per_token = node.load_per_token * trees.unit_s(),
         .time_per_attention = node.attention_share * trees.unit_s(),
         .token_capacity = max_tokens_ > 0 ? static_cast<double>(max_tokens_) * node.degree : kInfinity});
  }
  constexpr double kOneSpeed = 1.05;
  std::vector<int32_t> order(replica.leaves.size());
  std::iota(order.begin(), order.end(), 0);
  const auto slowness = [&](int32_t leaf) { return replica.leaves[leaf].time_per_token; };
  std::ranges::stable_sort(order, {}, slowness);
  for (const int32_t leaf : order) {
    if (replica.classes.empty() || slowness(leaf) > kOneSpeed * replica.classes.back().time_per_token) {
      replica.classes.push_back({.leaves = {},
                                 .time_per_token = replica.leaves[leaf].time_per_token,
                                 .time_per_attention = replica.leaves[leaf].time_per_attention});
    }
    replica.classes.back().leaves.push_back(leaf);
  }
  for (Class& kind : replica.classes) std::ranges::sort(kind.leaves);
}

void MicroBatchPacking::add_items(Replica& replica) const {
  const PlacementTrees& trees = replica.trees;
  std::vector<int32_t> sharing_nodes;  // one for each degree of sharing, ascending
  for (const int32_t degree : trees.degrees()) {
    for (int32_t bag = 0; bag < trees.num_bags(); ++bag) {
      const auto [first, last] = trees.nodes_of(bag, degree);
      if (first == last || trees.node(first).num_children == 0) continue;
      sharing_nodes.push_back(first);
      break;
    }
  }
  const double longest_s = bound_s_ * (1 + 1e-9);
  replica.items.reserve(trees.items().size());
  for (const TreeItem& tree_item : trees.items()) {
    Item item{.tokens = tree_item.tokens, .attention = tree_item.attention, .longest_s = kInfinity};
    bool is_held = false;  // within the limit of tokens
    for (const Class& kind : replica.classes) {
      item.longest_s =
          std::min(item.longest_s, item.tokens * kind.time_per_token + item.attention * kind.time_per_attention);
      is_held = is_held || item.tokens <= replica.leaves[kind.leaves.front()].token_capacity;
    }
    for (const int32_t v : sharing_nodes) {
      if (item.longest_s <= longest_s && is_held) break;
      const PlacementTrees::Node& node = trees.node(v);
      item.longest_s = trees.cost(tree_item, v) * trees.unit_s();
      item.shared_node = v;
      item.num_leaves = node.degree;
      is_held = max_tokens_ == 0 || item.tokens <= static_cast<double>(max_tokens_) * node.degree;
    }
    replica.items.push_back(item);
  }
}

std::vector<double> MicroBatchPacking::levels_s(const PackingShape& shape, int32_t num_micro_batches) const {
  std::vector<double> levels(static_cast<size_t>(num_micro_batches), 0.0);
  std::vector<size_t> next(replicas_.size(), 0);  // the longest item that no level has room for yet
  // Above the longest sequence of a level there is room for short ones: what a bin lacks is then never less than those
  // that could fill it.
  double margin_s = 0;
  for (const Replica& replica : replicas_) {
    if (!replica.items.empty()) margin_s = std::max(margin_s, replica.items[replica.items.size() * 3 / 4].longest_s);
  }
  double left_s = bound_s_;
  for (int32_t k = 0; k < shape.used; ++k) {
    double longest_s = 0;
    for (size_t r = 0; r < replicas_.size(); ++r) {
      // Items come by descending work; where some are shared, the longest that are left may follow later.
      const auto& items = replicas_[r].items;
      for (size_t i = next[r]; i < items.size(); ++i) {
        longest_s = std::max(longest_s, items[i].longest_s);
        if (items[i].num_leaves == 1) break;
      }
    }
    const double even_s = std::max(0.0, left_s) / (shape.used - k);
    if ((longest_s <= even_s && k >= shape.stepped) || k + 1 == shape.used) {
      for (int32_t j = k; j < shape.used; ++j) levels[j] = even_s;
      break;
    }
    levels[k] = std::min(longest_s + margin_s, std::max(0.0, left_s));
    left_s -= levels[k];
    for (size_t r = 0; r < replicas_.size(); ++r) {
      const auto& items = replicas_[r].items;
      double free_leaves = static_cast<double>(replicas_[r].leaves.size());
      for (; next[r] < items.size() && free_leaves > 0; ++next[r]) {
        const Item& item = items[next[r]];
        const double fit = item.longest_s > 0 ? std::max(1.0, std::floor(levels[k] / item.longest_s)) : 1.0;
        free_leaves -= item.num_leaves / fit;
      }
    }
  }
  return levels;
}

void MicroBatchPacking::put(Replica& replica, int32_t item, int32_t bin) const {
  const Leaf& leaf = replica.leaves[static_cast<size_t>(bin) % replica.leaves.size()];
  replica.token_s[bin] += replica.items[item].tokens * leaf.time_per_token;
  replica.attention_s[bin] += replica.items[item].attention * leaf.time_per_attention;
  replica.tokens[bin] += replica.items[item].tokens;
  replica.next_item[item] = replica.first_item[bin];
  replica.first_item[bin] = item;
  replica.bin_of_item[item] = bin;
}

void MicroBatchPacking::take_out(Replica& replica, int32_t item, int32_t bin) const {
  const Leaf& leaf = replica.leaves[static_cast<size_t>(bin) % replica.leaves.size()];
  replica.token_s[bin] -= replica.items[item].tokens * leaf.time_per_token;
  replica.attention_s[bin] -= replica.items[item].attention * leaf.time_per_attention;
  replica.tokens[bin] -= replica.items[item].tokens;
  int32_t* link = &replica.first_item[bin];
  while (*link != item) link = &replica.next_item[*link];
  *link = replica.next_item[item];
}

double MicroBatchPacking::token_sum_s(const Replica& replica, const Group& group) {
  double sum_s = 0;
  for (int32_t bin = group.first; bin < group.first + group.size; ++bin)
    sum_s += replica.token_s[bin] + group.exchange_per_token * replica.tokens[bin];
  return sum_s;
}

double MicroBatchPacking::attention_s(const Replica& replica, int32_t bin) {
  const double whole_tokens = replica.tokens[bin] - replica.shared_tokens[bin];
  return replica.attention_s[bin] - replica.groups[bin].exchange_per_token * whole_tokens;
}

double MicroBatchPacking::group_s(const Replica& replica, const Group& group) {
  double longest_s = attention_s(replica, group.first);
  for (int32_t bin = group.first + 1; bin < group.first + group.size; ++bin)
    longest_s = std::max(longest_s, attention_s(replica, bin));
  return token_sum_s(replica, group) / group.size + longest_s;
}

void MicroBatchPacking::share(Replica& replica, int32_t index) {
  // Always in the first micro-batch, which has the highest level: by the group whose fullest rank is the freest.
  const PlacementTrees& trees = replica.trees;
  const Item& item = replica.items[index];
  const int32_t degree = trees.node(item.shared_node).degree;
  int32_t best = -1;
  double min_s = kInfinity;
  for (int32_t bag = 0; bag < trees.num_bags(); ++bag) {
    const auto [first, last] = trees.nodes_of(bag, degree);
    for (int32_t v = first; v < last; ++v) {
      int32_t leaf_node = v;
      while (trees.node(leaf_node).num_children > 0) leaf_node = trees.node(leaf_node).first_child;
      const int32_t leaf = replica.leaf_of_node[leaf_node];
      const int32_t num_leaves = degree / trees.node(leaf_node).degree;
      double load_s = 0;
      for (int32_t i = leaf; i < leaf + num_leaves; ++i)
        load_s = std::max(load_s, replica.token_s[i] + replica.attention_s[i]);
      if (load_s < min_s) {
        min_s = load_s;
        best = v;
      }
    }
  }
  KNAPFORMER_ASSERT(best >= 0);
  int32_t leaf_node = best;
  while (trees.node(leaf_node).num_children > 0) leaf_node = trees.node(leaf_node).first_child;
  const int32_t leaf = replica.leaf_of_node[leaf_node];
  const int32_t num_leaves = degree / trees.node(leaf_node).degree;
  const PlacementTrees::Node& node = trees.node(best);
  Group group{.first = leaf, .size = num_leaves, .exchange_per_token = node.exchange_per_token * trees.unit_s()};
  for (int32_t i = leaf; i < leaf + num_leaves; ++i) {
    replica.token_s[i] += item.tokens / num_leaves * replica.leaves[i].time_per_token;
    replica.attention_s[i] += item.attention * node.attention_share * trees.unit_s();
    replica.tokens[i] += item.tokens / num_leaves;
    replica.shared_tokens[i] += item.tokens / num_leaves;
    if (replica.groups[i].size > group.size) group = replica.groups[i];  // groups nest
  }
  for (int32_t i = group.first; i < group.first + group.size; ++i) replica.groups[i] = group;
  replica.bin_of_item[index] = leaf;
  replica.node_of_item[index] = best;
  is_whole_[0] = 0;
}

void MicroBatchPacking::fill(Replica& replica) {
  const size_t num_leaves = replica.leaves.size(), num_bins = num_leaves * levels_s_.size();
  replica.token_s.assign(num_bins, 0.0);
  replica.attention_s.assign(num_bins, 0.0);
  replica.shared_tokens.assign(num_bins, 0.0);
  replica.groups.resize(num_bins);
  for (size_t bin = 0; bin < num_bins; ++bin) replica.groups[bin] = {.first = static_cast<int32_t>(bin), .size = 1};
  replica.tokens.assign(num_bins, 0.0);
  replica.first_item.assign(num_bins, -1);
  replica.next_item.assign(replica.items.size(), -1);
  replica.bin_of_item.assign(replica.items.size(), -1);
  replica.node_of_item.assign(replica.items.size(), -1);
  for (size_t i = 0; i < replica.items.size(); ++i) {
    if (replica.items[i].shared_node >= 0) share(replica, static_cast<int32_t>(i));
  }
  // How full a bin is, in seconds: of its level, or of its tokens.
  const auto fullness_s = [&](int32_t k, int32_t leaf) {
    const size_t bin = static_cast<size_t>(k) * num_leaves + static_cast<size_t>(leaf);
    const double load_s = replica.token_s[bin] + replica.attention_s[bin] +
                          replica.groups[bin].exchange_per_token * replica.shared_tokens[bin];
    if (max_tokens_ == 0) return load_s;
    return std::max(load_s, levels_s_[k] * replica.tokens[bin] / replica.leaves[leaf].token_capacity);
  };
  /// Bins of one kind in one micro-batch, and the one of them that is next.
  struct Queue {
    int32_t micro_batch;
    const Class* kind;
    WinnerTree fullness;
    int32_t leaf = 0;
    double min_s = 0, free_tokens = 0;
  };
  const auto bin_of = [&](const Queue& queue) {
    return static_cast<size_t>(queue.micro_batch) * num_leaves + static_cast<size_t>(queue.leaf);
  };
  const auto find_next = [&](Queue& queue) {
    const auto now_s = [&] {
      queue.leaf = queue.kind->leaves[queue.fullness.winner()];
      return fullness_s(queue.micro_batch, queue.leaf);
    };
    // Shared items lie in bins already: bring the minimum up to date until it stays.
    for (double now = now_s(); now > queue.fullness.min(); now = now_s()) queue.fullness.set_min(now);
    queue.min_s = queue.fullness.min();
    queue.free_tokens = replica.leaves[queue.leaf].token_capacity - replica.tokens[bin_of(queue)];
  };
  std::vector<Queue> queues;
  for (size_t k = 0; k < levels_s_.size(); ++k) {
    if (levels_s_[k] <= 0 && k > 0) continue;
    for (const Class& kind : replica.classes) {
      queues.push_back(
          {.micro_batch = static_cast<int32_t>(k), .kind = &kind, .fullness = WinnerTree(kind.leaves.size())});
      find_next(queues.back());
    }
  }
  for (size_t i = 0; i < replica.items.size(); ++i) {
    const Item& item = replica.items[i];
    if (item.shared_node >= 0) continue;
    Queue* best = nullptr;
    double min_s = kInfinity;
    bool best_fits = false;
    for (Queue& queue : queues) {
      const bool fits = item.tokens <= queue.free_tokens;
      const double then_s = queue.min_s + item.tokens * queue.kind->time_per_token +
                            item.attention * queue.kind->time_per_attention - levels_s_[queue.micro_batch];
      if (best != nullptr && (fits != best_fits ? best_fits : then_s >= min_s)) continue;
      best = &queue;
      min_s = then_s;
      best_fits = fits;
    }
    put(replica, static_cast<int32_t>(i), static_cast<int32_t>(bin_of(*best)));
    find_next(*best);
  }
}

std::vector<double> MicroBatchPacking::times_s() const {
  std::vector<double> times(levels_s_.size(), 0.0);
  for (const Replica& replica : replicas_) {
    for (size_t bin = 0; bin < replica.groups.size(); ++bin) {
      double& time_s = times[bin / replica.leaves.size()];
      if (replica.groups[bin].first == static_cast<int32_t>(bin))
        time_s = std::max(time_s, group_s(replica, replica.groups[bin]));
    }
  }
  return times;
}

std::vector<double> MicroBatchPacking::pack(std::vector<double> levels_s) {
  levels_s_ = std::move(levels_s);
  is_whole_.assign(levels_s_.size(), 1);
  for (Replica& replica : replicas_) {
    fill(replica);
    for (size_t bin = 0; bin < replica.tokens.size(); ++bin) {
      if (replica.tokens[bin] > replica.leaves[bin % replica.leaves.size()].token_capacity)
        is_whole_[bin / replica.leaves.size()] = 0;
    }
  }
  return times_s();
}

double MicroBatchPacking::overflow() const {
  if (max_tokens_ == 0) return 0;
  double over = 0, all = 0;
  for (const Replica& replica : replicas_) {
    const size_t num_leaves = replica.leaves.size();
    for (size_t k = 0; k < levels_s_.size(); ++k) {
      double tokens = 0, capacity = 0;
      for (size_t leaf = 0; leaf < num_leaves; ++leaf) {
        const double held = replica.tokens[k * num_leaves + leaf];
        tokens += held;
        capacity += replica.leaves[leaf].token_capacity;
        over += std::max(0.0, held - replica.leaves[leaf].token_capacity);
      }
      if (tokens > capacity) return kInfinity;
      all += tokens;
    }
  }
  return all > 0 ? over / all : 0;
}

/// What a bin gives away or takes: nothing, a sequence, or two.
struct MicroBatchPacking::Lot {
  double tokens = 0, attention = 0;
  int32_t items[2] = {-1, -1};
};

/// Step 3. The excess of a bin is its time above the level of its micro-batch. Where the fullest bin of a micro-batch
/// can give nothing away any more, its time is the level from then on: so the other bins of the micro-batch may take
/// more, and what the others take less.
class MicroBatchPacking::Refinement {
 public:
  Refinement(const MicroBatchPacking& packing, Replica& replica)
      : packing_(packing),
        replica_(replica),
        num_leaves_(static_cast<int32_t>(replica.leaves.size())),
        random_(packing.key_) {
    for (size_t bin = 0; bin < replica.groups.size(); ++bin) {
      if (packing.levels_s_[bin / replica.leaves.size()] > 0) bins_.push_back(static_cast<int32_t>(bin));
    }
  }

  void run(int64_t num_trials, double good_enough_s, int32_t num_kicks) {
    trials_left_ = num_trials;
    double best_s = descend(good_enough_s);
    std::vector<int32_t> best;
    for (int32_t i = 0; i < num_kicks && best_s > good_enough_s && trials_left_ > 0; ++i) {
      best = replica_.bin_of_item;
      kick();
      const double now_s = descend(good_enough_s);
      if (now_s < best_s) {
        best_s = now_s;
      } else {
        restore(best);
      }
    }
  }

 private:
  static constexpr size_t kFewForPairs = 4096;

  /// Trades until none helps. Returns the sum of the times.
  double descend(double good_enough_s) {
    level_s_ = packing_.levels_s_;
    is_settled_.assign(level_s_.size(), 0);
    excess_s_ = excesses();
    sum_s_ = std::accumulate(level_s_.begin(), level_s_.end(), 0.0);
    num_open_ = static_cast<int32_t>(std::ranges::count_if(level_s_, [](double level_s) { return level_s > 0; }));
    std::vector<double> keys;
    for (size_t bin = 0; bin < excess_s_.size(); ++bin)
      keys.push_back(level_s_[bin / replica_.leaves.size()] > 0 ? -excess_s_[bin] : kInfinity);
    fullest_ = WinnerTree(keys);
    const bool tries_pairs = replica_.items.size() <= kFewForPairs;
    while (trials_left_ > 0 && num_open_ > 0 && sum_s_ + num_open_ * max_excess_s() > good_enough_s) {
      const int32_t bin = fullest_.winner();
      find(bin, /*with_pairs=*/false);
      if (best_bin_ < 0 && tries_pairs) find(bin, /*with_pairs=*/true);
      if (best_bin_ < 0) {
        settle(bin / num_leaves_);
      } else {
        trade();
      }
    }
    return sum_s_ + (num_open_ > 0 ? num_open_ * max_excess_s() : 0.0);
  }

  void kick() {
    constexpr int32_t kSwaps = 3;
    for (int32_t i = 0; i < kSwaps; ++i) {
      const int32_t bins[] = {bins_[random_.below(static_cast<int32_t>(bins_.size()))],
                              bins_[random_.below(static_cast<int32_t>(bins_.size()))]};
      if (bins[0] == bins[1]) continue;
      Lot lots[2];
      for (int32_t side = 0; side < 2; ++side) {
        list_lots(bins[side], false, given_);
        if (!given_.empty()) lots[side] = given_[random_.below(static_cast<int32_t>(given_.size()))];
      }
      const double tokens = lots[0].tokens - lots[1].tokens;
      if (replica_.tokens[bins[0]] - tokens > replica_.leaves[bins[0] % num_leaves_].token_capacity ||
          replica_.tokens[bins[1]] + tokens > replica_.leaves[bins[1] % num_leaves_].token_capacity)
        continue;
      move(lots[0], bins[0], bins[1]);
      move(lots[1], bins[1], bins[0]);
    }
  }

  void restore(const std::vector<int32_t>& bin_of_item) {
    for (size_t i = 0; i < bin_of_item.size(); ++i) {
      const int32_t from = replica_.bin_of_item[i];
      if (from == bin_of_item[i]) continue;
      packing_.take_out(replica_, static_cast<int32_t>(i), from);
      packing_.put(replica_, static_cast<int32_t>(i), bin_of_item[i]);
    }
  }

  void set_excess(int32_t bin, double excess_s) { fullest_.set(bin, -excess_s); }
  double max_excess_s() const { return -fullest_.min(); }

  /// Of the bin's group.
  double excess(int32_t bin) const { return group_s(replica_, replica_.groups[bin]) - level_s_[bin / num_leaves_]; }
  std::vector<double> excesses() const {
    std::vector<double> out;
    for (size_t bin = 0; bin < replica_.groups.size(); ++bin) out.push_back(excess(static_cast<int32_t>(bin)));
    return out;
  }
  /// The longest attention of the bin's group without it and another bin.
  double others_attention_s(int32_t bin, int32_t another) const {
    const Group& group = replica_.groups[bin];
    double longest_s = -kInfinity;
    for (int32_t b = group.first; b < group.first + group.size; ++b) {
      if (b != bin && b != another) longest_s = std::max(longest_s, attention_s(replica_, b));
    }
    return longest_s;
  }

  void list_lots(int32_t bin, bool with_pairs, std::vector<Lot>& lots) const {
    lots.clear();
    for (int32_t i = replica_.first_item[bin]; i >= 0; i = replica_.next_item[i])
      lots.push_back({.tokens = replica_.items[i].tokens, .attention = replica_.items[i].attention, .items = {i, -1}});
    if (!with_pairs) return;
    const size_t num_single = lots.size();
    for (size_t a = 0; a < num_single; ++a) {
      for (size_t b = a + 1; b < num_single; ++b) {
        lots.push_back({.tokens = lots[a].tokens + lots[b].tokens,
                        .attention = lots[a].attention + lots[b].attention,
                        .items = {lots[a].items[0], lots[b].items[0]}});
      }
    }
  }

  void find(int32_t fullest, bool with_pairs) {
    const Group& group = replica_.groups[fullest];
    best_bin_ = -1;
    best_s_ =
        excess_s_[fullest] - std::max(std::abs(excess_s_[fullest]) * 1e-6, level_s_[fullest / num_leaves_] * 1e-9);
    for (int32_t bin = group.first; bin < group.first + group.size; ++bin) find_from(bin, with_pairs);
  }

  /// The trade with the lowest excess of the two bins' groups, if it is lower than the best. All other bins are tried,
  /// or if they are many a sample, and of that only as many as it takes.
  void find_from(int32_t bin, bool with_pairs) {
    constexpr int32_t kSample = 32, kMostTried = 8 * kSample;
    list_lots(bin, with_pairs, given_);
    const Leaf& leaf = replica_.leaves[bin % num_leaves_];
    const Group& group = replica_.groups[bin];
    const double token_s = token_sum_s(replica_, group), here_attention_s = attention_s(replica_, bin);
    const double level_s = level_s_[bin / num_leaves_];
    const auto count = static_cast<int32_t>(bins_.size());
    const bool tries_all = count <= kMostTried;
    const int32_t num_tried = std::min(count, kMostTried), start = random_.below(count);
    for (int32_t t = 0; t < num_tried; ++t) {
      if (t % kSample == 0 && best_bin_ >= 0) break;
      const int32_t other = bins_[tries_all ? (start + t) % count : random_.below(count)];
      const Group& other_group = replica_.groups[other];
      const bool is_same = other_group.first == group.first;
      if (other == bin || (!is_same && excess_s_[other] >= best_s_)) continue;
      const Leaf& other_leaf = replica_.leaves[other % num_leaves_];
      list_lots(other, with_pairs, taken_);
      taken_.push_back({});
      trials_left_ -= std::ssize(given_) * std::ssize(taken_);
      if (group.size == 1 && other_group.size == 1) {
        // Nothing is shared, as nearly everywhere.
        try_lots(bin, other, [&](double tokens, double attention) {
          return std::max(
              excess_s_[bin] - tokens * leaf.time_per_token - attention * leaf.time_per_attention,
              excess_s_[other] + tokens * other_leaf.time_per_token + attention * other_leaf.time_per_attention);
        });
        continue;
      }
      const double rest_s = others_attention_s(bin, other), other_rest_s = others_attention_s(other, bin);
      const double other_token_s = token_sum_s(replica_, other_group);
      const double there_attention_s = attention_s(replica_, other);
      const double other_level_s = level_s_[other / num_leaves_];
      try_lots(bin, other, [&](double tokens, double attention) {
        const double here_s = std::max(
            rest_s, here_attention_s - attention * leaf.time_per_attention + tokens * group.exchange_per_token);
        const double there_s = std::max(other_rest_s, there_attention_s + attention * other_leaf.time_per_attention -
                                                          tokens * other_group.exchange_per_token);
        if (is_same) {
          return (token_s + tokens * (other_leaf.time_per_token - leaf.time_per_token)) / group.size +
                 std::max(here_s, there_s) - level_s;
        }
        const double less_s = tokens * (leaf.time_per_token + group.exchange_per_token);
        const double more_s = tokens * (other_leaf.time_per_token + other_group.exchange_per_token);
        return std::max((token_s - less_s) / group.size + here_s - level_s,
                        (other_token_s + more_s) / other_group.size + there_s - other_level_s);
      });
    }
  }

  /// Of what the bins may trade, the best. `excess_of(tokens, attention)`: the higher excess after these net amounts
  /// went from here to there.
  template <class ExcessOf>
  void try_lots(int32_t bin, int32_t other, const ExcessOf& excess_of) {
    const double free_here = replica_.leaves[bin % num_leaves_].token_capacity - replica_.tokens[bin];
    const double free_there = replica_.leaves[other % num_leaves_].token_capacity - replica_.tokens[other];
    for (const Lot& given : given_) {
      for (const Lot& taken : taken_) {
        const double tokens = given.tokens - taken.tokens;
        const double then_s = excess_of(tokens, given.attention - taken.attention);
        if (then_s >= best_s_ || -tokens > free_here || tokens > free_there) continue;
        best_s_ = then_s;
        best_from_ = bin;
        best_bin_ = other;
        best_given_ = given;
        best_taken_ = taken;
      }
    }
  }

  void move(const Lot& lot, int32_t from, int32_t to) {
    for (const int32_t item : lot.items) {
      if (item < 0) continue;
      packing_.take_out(replica_, item, from);
      packing_.put(replica_, item, to);
    }
  }

  void trade() {
    move(best_given_, best_from_, best_bin_);
    move(best_taken_, best_bin_, best_from_);
    for (const int32_t traded : {best_from_, best_bin_}) {
      const Group& group = replica_.groups[traded];
      const double now_s = excess(traded);
      for (int32_t b = group.first; b < group.first + group.size; ++b) {
        excess_s_[b] = now_s;
        if (is_settled_[b / num_leaves_] == 0) set_excess(b, now_s);
      }
    }
  }

  void settle(int32_t micro_batch) {
    is_settled_[micro_batch] = 1;
    --num_open_;
    const double above_s = max_excess_s();
    level_s_[micro_batch] += above_s;
    sum_s_ += above_s;
    for (int32_t b = micro_batch * num_leaves_; b < (micro_batch + 1) * num_leaves_; ++b) {
      excess_s_[b] = excess(b);
      set_excess(b, -kInfinity);
    }
  }

  const MicroBatchPacking& packing_;
  Replica& replica_;
  int32_t num_leaves_;
  std::vector<double> level_s_;
  std::vector<char> is_settled_;  // by micro-batch
  std::vector<double> excess_s_;  // by bin
  WinnerTree fullest_{1};         // by bin, its excess, negated; of micro-batches that are not settled
  Random random_;
  std::vector<int32_t> bins_;  // of micro-batches that are in use
  double sum_s_ = 0;           // of the levels
  int32_t num_open_ = 0;       // micro-batches in use and not settled
  int64_t trials_left_ = 0;
  std::vector<Lot> given_, taken_;
  int32_t best_from_ = -1, best_bin_ = -1;
  double best_s_ = 0;
  Lot best_given_, best_taken_;
};

std::vector<double> MicroBatchPacking::refine(int64_t num_trials, double good_enough_s, int32_t num_kicks) {
  for (Replica& replica : replicas_) Refinement(*this, replica).run(num_trials, good_enough_s, num_kicks);
  return times_s();
}

std::vector<PackedSequence> MicroBatchPacking::sequences() const {
  std::vector<PackedSequence> out(static_cast<size_t>(num_sequences_));
  for (const Replica& replica : replicas_) {
    const auto num_leaves = static_cast<int32_t>(replica.leaves.size());
    for (size_t i = 0; i < replica.items.size(); ++i) {
      const int32_t bin = replica.bin_of_item[i];
      const int32_t node =
          replica.node_of_item[i] >= 0 ? replica.node_of_item[i] : replica.leaves[bin % num_leaves].node;
      out[replica.trees.items()[i].id.index()] = {.micro_batch = bin / num_leaves,
                                                  .placement = replica.trees.placement(node)};
    }
  }
  return out;
}

}  // namespace knapformer
