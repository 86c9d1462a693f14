#include "knapformer/core/balanced_fit.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "knapformer/core/error.h"

namespace knapformer {

BalancedFit::BalancedFit(BagForest& forest) : forest_(forest) {
  constexpr double kOneSpeed = 1.05;
  const auto load = [&](int32_t v) { return forest.node(v).load_per_token; };
  std::vector<int32_t> nodes;
  for (const int32_t degree : forest.degrees()) {
    first_queue_.push_back(queues_.size());
    nodes.clear();
    for (int32_t bag = 0; bag < forest.num_bags(); ++bag) {
      const auto [first, last] = forest.nodes_of(bag, degree);
      for (int32_t v = first; v < last; ++v) nodes.push_back(v);
    }
    std::stable_sort(nodes.begin(), nodes.end(), [&](int32_t a, int32_t b) { return load(a) < load(b); });
    for (auto first = nodes.begin(), last = first; first != nodes.end(); first = last) {
      const double least = load(*first);
      last = std::find_if(first, nodes.end(), [&](int32_t v) { return load(v) > kOneSpeed * least; });
      std::sort(first, last);
      queues_.push_back({.nodes = {first, last}, .occupancy = WinnerTree(static_cast<size_t>(last - first))});
    }
  }
  first_queue_.push_back(queues_.size());
}

void BalancedFit::refresh_bag_of(int32_t v) {
  const int32_t bag = forest_.node(v).bag;
  if (!is_stale_[static_cast<size_t>(bag)]) return;
  is_stale_[static_cast<size_t>(bag)] = 0;
  forest_.update_bag(bag);
}

bool BalancedFit::place_alone(const ForestItem& item, int32_t v, double target) {
  const BagForest::Node& n = forest_.node(v);
  if (n.num_children > 0 || n.parent < 0) return false;
  for (int32_t x = n.parent; x >= 0; x = forest_.node(x).parent) {
    if (forest_.state(x).num_sequences > 0) return false;
  }
  if (forest_.group_time(v) + forest_.cost(item, v) > target ||
      forest_.state(v).tokens + item.tokens > n.token_capacity)
    return false;
  forest_.add(item, v);
  forest_.update_node(v);
  is_stale_[static_cast<size_t>(n.bag)] = 1;
  return true;
}

double BalancedFit::occupancy(int32_t v) const {
  const double load = forest_.load(v);
  const BagForest::Node& n = forest_.node(v);
  if (!std::isfinite(n.token_capacity)) return load;
  double tokens = forest_.state(v).subtree_tokens;
  for (int32_t x = n.parent; x >= 0; x = forest_.node(x).parent)
    tokens += forest_.state(x).tokens * n.degree / forest_.node(x).degree;
  return std::max(load, target_ * tokens / n.token_capacity);
}

int32_t BalancedFit::freest(Queue& queue) {
  while (true) {
    const int32_t v = queue.nodes[static_cast<size_t>(queue.occupancy.winner())];
    if (forest_.node(v).num_children > 0) refresh_bag_of(v);
    const double now = occupancy(v);
    if (now <= queue.occupancy.least()) return v;
    queue.occupancy.set_least(now);
    if (queue.nodes[static_cast<size_t>(queue.occupancy.winner())] == v) return v;
  }
}

int32_t BalancedFit::freest_for(const ForestItem& item, size_t k) {
  const size_t first = first_queue_[k], last = first_queue_[k + 1];
  int32_t best = freest(queues_[first]);
  if (last - first == 1) return best;
  double least = occupancy(best) + forest_.cost(item, best);
  for (size_t q = first + 1; q < last; ++q) {
    const int32_t v = freest(queues_[q]);
    const double now = occupancy(v) + forest_.cost(item, v);
    if (now < least) {
      least = now;
      best = v;
    }
  }
  return best;
}

double BalancedFit::place_all(double target, std::vector<int32_t>& node_of_item) {
  target_ = target;
  forest_.clear();
  for (Queue& queue : queues_) queue.occupancy = WinnerTree(queue.nodes.size());
  is_stale_.assign(static_cast<size_t>(forest_.num_bags()), 0);
  const auto items = forest_.items();
  node_of_item.resize(items.size());
  BagForest::SavedPath saved;
  for (size_t i = 0; i < items.size(); ++i) {
    const ForestItem& item = items[i];
    int32_t best = -1;
    double best_time = std::numeric_limits<double>::infinity();
    bool placed = false;
    const size_t num_degrees = forest_.degrees().size();
    for (size_t k = 0; k < num_degrees && !placed; ++k) {
      const int32_t v = freest_for(item, k);
      const bool last = k + 1 == num_degrees;
      if (forest_.cost(item, v) > target && !(last && best < 0)) continue;
      if (place_alone(item, v, target)) {
        node_of_item[i] = v;
        placed = true;
        break;
      }
      refresh_bag_of(v);
      forest_.save(v, saved);
      forest_.add(item, v);
      forest_.update_path(v);
      const double time = forest_.group_time(v);
      if (time <= target) {
        node_of_item[i] = v;
        placed = true;
        break;
      }
      forest_.restore(v, saved);
      if (time < best_time) {
        best_time = time;
        best = v;
      }
    }
    if (placed) continue;
    KNAPFORMER_ASSERT(best >= 0);
    refresh_bag_of(best);
    forest_.add(item, best);
    forest_.update_path(best);
    node_of_item[i] = best;
  }
  forest_.update_all();
  return forest_.slowest();
}

}  // namespace knapformer
