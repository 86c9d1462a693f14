#include "knapformer/core/planners/whole_step/packing.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "knapformer/core/cost/step_time.h"
#include "knapformer/core/planners/balanced/anneal.h"
#include "knapformer/core/planners/balanced/construct.h"
#include "knapformer/core/planners/balanced/placement_tree.h"

namespace knapformer {
namespace {

Packing pack(const PlanInput& input, std::span<const double> levels_s, Construction::FitBy fit_by, double target_s,
             Effort effort) {
  const auto num_sequences = static_cast<size_t>(input.seq_lens.num_sequences());
  Packing packing{.micro_batches = std::vector<int32_t>(num_sequences),
                  .placements = std::vector<Placement>(num_sequences),
                  .levels_s = {levels_s.begin(), levels_s.end()},
                  .times_s = std::vector<double>(levels_s.size())};
  for (int32_t replica = 0; replica < input.topology.num_replicas(); ++replica) {
    PlacementTrees trees(input, replica, Objective::kTime, levels_s);
    if (trees.items().empty()) continue;
    if (input.max_tokens_per_rank > 0) trees.set_token_limit(input.max_tokens_per_rank);
    std::vector<int32_t> nodes;
    Construction(trees).place_all(target_s / trees.unit_s(), fit_by, nodes);
    if (effort.moves != Effort::kLow) {
      const double bound = std::ranges::max(levels_s) / trees.unit_s();
      improve(trees, nodes, trees.slowest(),
              {.num_moves = num_moves(trees, effort.moves),
               .key = random_key(input, replica),
               .bound = bound,
               .good_enough = bound * Effort::kGoodEnough,
               .last_temperature = 0.0005});
    }
    packing.keeps_limit = packing.keeps_limit && trees.keeps_limit();
    for (int32_t bag = 0; bag < trees.num_bags(); ++bag) {
      const double seconds = (trees.bag_time(bag) - trees.node(trees.root(bag)).head_start) * trees.unit_s();
      double& time_s = packing.times_s[trees.micro_batch_of(bag)];
      time_s = std::max(time_s, seconds);
    }
    for (size_t i = 0; i < nodes.size(); ++i) {
      const size_t s = trees.items()[i].id.index();
      packing.micro_batches[s] = trees.micro_batch_of(trees.node(nodes[i]).bag);
      packing.placements[s] = trees.placement(nodes[i]);
    }
  }
  return packing;
}

}  // namespace

std::vector<double> stepped_levels_s(const PlanInput& input, double sum_s, int32_t count, int32_t max_steps) {
  struct Item {
    double seconds;  // with the smallest degree with which it fits the sum
    int32_t degree;
  };
  std::vector<std::vector<Item>> replicas;  // descending
  for (int32_t replica = 0; replica < input.topology.num_replicas(); ++replica) {
    const PlacementTrees trees(input, replica, Objective::kTime);
    std::vector<Item>& items = replicas.emplace_back();
    for (const TreeItem& tree_item : trees.items()) {
      Item item{};
      for (const int32_t degree : trees.degrees()) {
        int32_t bag = 0;
        while (trees.nodes_of(bag, degree).first == trees.nodes_of(bag, degree).second) ++bag;
        item = {.seconds = trees.cost(tree_item, trees.nodes_of(bag, degree).first) * trees.unit_s(), .degree = degree};
        if (item.seconds <= sum_s) break;
      }
      items.push_back(item);
    }
    std::ranges::stable_sort(items, std::greater(), &Item::seconds);
  }
  std::vector<double> levels_s;
  std::vector<size_t> next(replicas.size());  // the longest item that no level has room for yet
  double left_s = sum_s;
  for (int32_t k = 0; k < count && left_s > 0; ++k) {
    double longest_s = 0;
    for (size_t r = 0; r < replicas.size(); ++r) {
      if (next[r] < replicas[r].size()) longest_s = std::max(longest_s, replicas[r][next[r]].seconds);
    }
    const double even_s = left_s / (count - k);
    if (longest_s <= even_s || k + 1 == count || k == max_steps) {
      levels_s.resize(static_cast<size_t>(count), even_s);
      break;
    }
    levels_s.push_back(std::min(longest_s, left_s));
    left_s -= levels_s.back();
    for (size_t r = 0; r < replicas.size(); ++r) {
      double free_ranks = input.topology.num_ranks_per_replica();
      for (; next[r] < replicas[r].size() && free_ranks > 0; ++next[r]) {
        const Item& item = replicas[r][next[r]];
        free_ranks -= item.degree / std::max(1.0, std::floor(levels_s.back() / item.seconds));
      }
    }
  }
  return levels_s;
}

Packing pack_by_time(const PlanInput& input, std::span<const double> levels_s, Sharing sharing, Effort effort) {
  // Of 0.5, 1, 2 and 3 % the margin matters little; 1 % comes closest to the goals of micro_batches_test.cpp.
  constexpr double kMargin = 1.01;
  const double highest_s = std::ranges::max(levels_s);
  if (sharing == Sharing::kLeast) return pack(input, levels_s, Construction::FitBy::kAlone, highest_s, effort);
  const double target_s = sharing == Sharing::kMore ? highest_s * kMargin : 0;
  return pack(input, levels_s, Construction::FitBy::kTime, target_s, effort);
}

Packing pack_by_tokens(const PlanInput& input, int32_t num_micro_batches, bool in_whole_bags) {
  // Without attention and exchanges, time is tokens.
  PlanInput tokens = input;
  tokens.workload.gamma = 0;
  tokens.given_work.clear();
  tokens.rank_speed.clear();
  tokens.cluster = {
      .node_bytes_per_s = kInfinity, .network_bytes_per_s = kInfinity, .node_latency_s = 0, .network_latency_s = 0};
  const double limit_s = static_cast<double>(input.max_tokens_per_rank) * BlockRates(tokens).token_s * (1 + 1e-9);
  return pack(tokens, std::vector<double>(static_cast<size_t>(num_micro_batches), limit_s), Construction::FitBy::kTime,
              in_whole_bags ? 0 : limit_s, {.moves = Effort::kLow});
}

}  // namespace knapformer
