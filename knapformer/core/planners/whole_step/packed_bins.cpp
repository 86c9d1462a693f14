#include "knapformer/core/planners/whole_step/packed_bins.h"

#include <algorithm>
#include <numeric>

#include "knapformer/core/util/error.h"
#include "knapformer/core/util/infinity.h"

namespace knapformer {
namespace {

/// The first leaf below a node.
int32_t first_leaf_below(const PlacementTrees& trees, int32_t v) {
  while (trees.node(v).num_children > 0) v = trees.node(v).first_child;
  return v;
}

}  // namespace

PackedBins::PackedBins(const PlanInput& input, int32_t replica, double bound_s)
    : trees(input, replica, Objective::kTime) {
  add_leaves(input.max_tokens_per_rank);
  add_items(bound_s, input.max_tokens_per_rank);
}

void PackedBins::clear(size_t num_micro_batches) {
  const size_t num_bins = leaves.size() * num_micro_batches;
  token_s.assign(num_bins, 0.0);
  attention_s.assign(num_bins, 0.0);
  tokens.assign(num_bins, 0.0);
  shared_tokens.assign(num_bins, 0.0);
  groups.resize(num_bins);
  for (size_t bin = 0; bin < num_bins; ++bin) groups[bin] = {.first = static_cast<int32_t>(bin), .size = 1};
  first_item.assign(num_bins, -1);
  next_item.assign(items.size(), -1);
  bin_of_item.assign(items.size(), -1);
  node_of_item.assign(items.size(), -1);
}

void PackedBins::add_leaves(int64_t max_tokens) {
  leaf_of_node.assign(static_cast<size_t>(trees.num_nodes()), -1);
  for (int32_t v = 0; v < trees.num_nodes(); ++v) {
    const PlacementTrees::Node& node = trees.node(v);
    if (node.num_children > 0) continue;
    leaf_of_node[v] = static_cast<int32_t>(leaves.size());
    leaves.push_back({.node = v,
                      .time_per_token = node.load_per_token * trees.unit_s(),
                      .time_per_attention = node.attention_share * trees.unit_s(),
                      .token_capacity = max_tokens > 0 ? static_cast<double>(max_tokens) * node.degree : kInfinity});
  }
  constexpr double kOneSpeed = 1.05;
  std::vector<int32_t> order(leaves.size());
  std::iota(order.begin(), order.end(), 0);
  const auto slowness = [&](int32_t leaf) { return leaves[leaf].time_per_token; };
  std::ranges::stable_sort(order, {}, slowness);
  for (const int32_t leaf : order) {
    if (classes.empty() || slowness(leaf) > kOneSpeed * classes.back().time_per_token) {
      classes.push_back({.leaves = {},
                         .time_per_token = leaves[leaf].time_per_token,
                         .time_per_attention = leaves[leaf].time_per_attention});
    }
    classes.back().leaves.push_back(leaf);
  }
  for (Class& kind : classes) std::ranges::sort(kind.leaves);
}

void PackedBins::add_items(double bound_s, int64_t max_tokens) {
  std::vector<int32_t> sharing_nodes;  // one for each degree of sharing, ascending
  for (const int32_t degree : trees.degrees()) {
    for (int32_t bag = 0; bag < trees.num_bags(); ++bag) {
      const auto [first, last] = trees.nodes_of(bag, degree);
      if (first == last || trees.node(first).num_children == 0) continue;
      sharing_nodes.push_back(first);
      break;
    }
  }
  const double longest_s = bound_s * (1 + 1e-9);
  items.reserve(trees.items().size());
  for (const TreeItem& tree_item : trees.items()) {
    Item item{.tokens = tree_item.tokens, .attention = tree_item.attention, .longest_s = kInfinity};
    bool is_held = false;  // within the limit of tokens
    for (const Class& kind : classes) {
      item.longest_s =
          std::min(item.longest_s, item.tokens * kind.time_per_token + item.attention * kind.time_per_attention);
      is_held = is_held || item.tokens <= leaves[kind.leaves.front()].token_capacity;
    }
    for (const int32_t v : sharing_nodes) {
      if (item.longest_s <= longest_s && is_held) break;
      const PlacementTrees::Node& node = trees.node(v);
      item.longest_s = trees.cost(tree_item, v) * trees.unit_s();
      item.shared_node = v;
      item.num_leaves = node.degree;
      is_held = max_tokens == 0 || item.tokens <= static_cast<double>(max_tokens) * node.degree;
    }
    items.push_back(item);
  }
}

void PackedBins::put(int32_t item, int32_t bin) {
  const Leaf& leaf = leaf_of(bin);
  token_s[bin] += items[item].tokens * leaf.time_per_token;
  attention_s[bin] += items[item].attention * leaf.time_per_attention;
  tokens[bin] += items[item].tokens;
  next_item[item] = first_item[bin];
  first_item[bin] = item;
  bin_of_item[item] = bin;
}

void PackedBins::take_out(int32_t item, int32_t bin) {
  const Leaf& leaf = leaf_of(bin);
  token_s[bin] -= items[item].tokens * leaf.time_per_token;
  attention_s[bin] -= items[item].attention * leaf.time_per_attention;
  tokens[bin] -= items[item].tokens;
  int32_t* link = &first_item[bin];
  while (*link != item) link = &next_item[*link];
  *link = next_item[item];
}

double PackedBins::token_sum_s(const Group& group) const {
  double sum_s = 0;
  for (int32_t bin = group.first; bin < group.first + group.size; ++bin)
    sum_s += token_s[bin] + group.exchange_per_token * tokens[bin];
  return sum_s;
}

double PackedBins::attention_less_exchange_s(int32_t bin) const {
  const double whole_tokens = tokens[bin] - shared_tokens[bin];
  return attention_s[bin] - groups[bin].exchange_per_token * whole_tokens;
}

double PackedBins::group_s(const Group& group) const {
  double longest_s = attention_less_exchange_s(group.first);
  for (int32_t bin = group.first + 1; bin < group.first + group.size; ++bin)
    longest_s = std::max(longest_s, attention_less_exchange_s(bin));
  return token_sum_s(group) / group.size + longest_s;
}

void PackedBins::share(int32_t index, int32_t num_micro_batches) {
  const Item& item = items[index];
  const int32_t degree = trees.node(item.shared_node).degree;
  int32_t best = -1, best_bin = -1;
  double min_s = kInfinity;
  bool best_fits = false;
  for (int32_t k = 0; k < num_micro_batches; ++k) {
    for (int32_t bag = 0; bag < trees.num_bags(); ++bag) {
      const auto [first, last] = trees.nodes_of(bag, degree);
      for (int32_t v = first; v < last; ++v) {
        const int32_t leaf_node = first_leaf_below(trees, v);
        const int32_t bin = k * num_leaves() + leaf_of_node[leaf_node];
        const int32_t num_sharing = degree / trees.node(leaf_node).degree;
        double load_s = 0;
        bool fits = true;
        for (int32_t i = bin; i < bin + num_sharing; ++i) {
          load_s = std::max(load_s, token_s[i] + attention_s[i]);
          fits = fits && item.tokens / num_sharing <= free_tokens(i);
        }
        // In one micro-batch chunks may be uneven, so what fits is not known yet.
        if (num_micro_batches == 1) fits = true;
        if (fits != best_fits ? fits : load_s < min_s) {
          min_s = load_s;
          best = v;
          best_bin = bin;
          best_fits = fits;
        }
      }
    }
  }
  KNAPFORMER_ASSERT(best >= 0);
  const int32_t num_sharing = degree / trees.node(leaf_of(best_bin).node).degree;
  const PlacementTrees::Node& node = trees.node(best);
  Group group{.first = best_bin, .size = num_sharing, .exchange_per_token = node.exchange_per_token * trees.unit_s()};
  for (int32_t i = best_bin; i < best_bin + num_sharing; ++i) {
    token_s[i] += item.tokens / num_sharing * leaf_of(i).time_per_token;
    attention_s[i] += item.attention * node.attention_share * trees.unit_s();
    tokens[i] += item.tokens / num_sharing;
    shared_tokens[i] += item.tokens / num_sharing;
    if (groups[i].size > group.size) group = groups[i];  // groups nest
  }
  for (int32_t i = group.first; i < group.first + group.size; ++i) groups[i] = group;
  bin_of_item[index] = best_bin;
  node_of_item[index] = best;
}

}  // namespace knapformer
