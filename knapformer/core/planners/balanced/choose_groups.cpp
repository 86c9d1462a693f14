#include "knapformer/core/planners/balanced/choose_groups.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "knapformer/core/planners/balanced/effort.h"
#include "knapformer/core/util/error.h"

namespace knapformer {

GroupChooser::GroupChooser(PlacementTrees& trees) : trees_(trees) {
  constexpr double kOneSpeed = 1.05;
  const auto load = [&](int32_t v) { return trees.node(v).load_per_token; };
  // Where a limit may keep sequences out of the micro-batch with the most time left, each micro-batch has its own
  // queues.
  const bool is_limited = trees.enforces_limit();
  const auto micro_batch = [&](int32_t v) { return is_limited ? trees.micro_batch_of(trees.node(v).bag) : 0; };
  std::vector<int32_t> nodes;
  for (const int32_t degree : trees.degrees()) {
    first_queue_.push_back(queues_.size());
    nodes.clear();
    for (int32_t bag = 0; bag < trees.num_bags(); ++bag) {
      const auto [first, last] = trees.nodes_of(bag, degree);
      for (int32_t v = first; v < last; ++v) nodes.push_back(v);
    }
    std::ranges::stable_sort(nodes, {}, [&](int32_t v) { return std::pair(micro_batch(v), load(v)); });
    for (auto first = nodes.begin(), last = first; first != nodes.end(); first = last) {
      last = std::find_if(first, nodes.end(), [&](int32_t v) {
        return load(v) > kOneSpeed * load(*first) || micro_batch(v) != micro_batch(*first);
      });
      std::sort(first, last);
      queues_.push_back({.nodes = {first, last}, .occupancy = WinnerTree(static_cast<size_t>(last - first))});
    }
  }
  first_queue_.push_back(queues_.size());
}

void GroupChooser::refresh_bag_of(int32_t v) {
  const int32_t bag = trees_.node(v).bag;
  if (std::exchange(is_stale_[bag], 0) != 0) trees_.update_bag(bag);
}

bool GroupChooser::place_alone(const TreeItem& item, int32_t v) {
  const PlacementTrees::Node& n = trees_.node(v);
  if (n.num_children > 0 || n.parent < 0) return false;
  for (int32_t x = n.parent; x >= 0; x = trees_.node(x).parent) {
    if (trees_.state(x).num_sequences > 0) return false;
  }
  const bool fits = sharing_ == Sharing::kLeast || trees_.group_time(v) + trees_.cost(item, v) <= target_;
  if (!fits || trees_.state(v).tokens + item.tokens > n.token_capacity) return false;
  trees_.add(item, v);
  trees_.update(v);
  is_stale_[n.bag] = 1;
  return true;
}

bool GroupChooser::has_room(int32_t v) const {
  while (v >= 0 && trees_.state(v).subtree_tokens <= trees_.node(v).token_capacity) v = trees_.node(v).parent;
  return v < 0;
}

double GroupChooser::occupancy(int32_t v) const {
  const double load = trees_.load(v);
  const PlacementTrees::Node& n = trees_.node(v);
  if (!std::isfinite(n.token_capacity)) return load;
  double tokens = trees_.state(v).subtree_tokens;
  for (int32_t x = n.parent; x >= 0; x = trees_.node(x).parent)
    tokens += trees_.state(x).tokens * n.degree / trees_.node(x).degree;
  return std::max(load, n.head_start + (target_ - n.head_start) * tokens / n.token_capacity);
}

int32_t GroupChooser::freest(Queue& queue) {
  while (true) {
    const int32_t v = queue.nodes[queue.occupancy.winner()];
    if (trees_.node(v).num_children > 0) refresh_bag_of(v);
    const double now = occupancy(v);
    if (now <= queue.occupancy.min()) return v;
    queue.occupancy.set_min(now);
    if (queue.nodes[queue.occupancy.winner()] == v) return v;
  }
}

int32_t GroupChooser::freest_for(const TreeItem& item, size_t k) {
  const size_t first = first_queue_[k], last = first_queue_[k + 1];
  if (last - first == 1) return freest(queues_[first]);
  int32_t best = -1;
  auto best_key = std::pair(true, kInfinity);
  for (size_t q = first; q < last; ++q) {
    const int32_t v = freest(queues_[q]);
    const bool is_full = trees_.state(v).subtree_tokens + item.tokens > trees_.node(v).token_capacity;
    const auto key = std::pair(is_full, occupancy(v) + trees_.cost(item, v));
    if (best >= 0 && key >= best_key) continue;
    best = v;
    best_key = key;
  }
  return best;
}

int32_t GroupChooser::place(const TreeItem& item) {
  const size_t num_degrees = trees_.degrees().size();
  checks_.count(256 * static_cast<int64_t>(num_degrees));
  int32_t best = -1;
  double best_time = kInfinity;
  for (size_t k = 0; k < num_degrees; ++k) {
    const int32_t v = freest_for(item, k);
    const bool must_try = k + 1 == num_degrees && best < 0;
    if (trees_.cost(item, v) > target_ && !must_try) continue;
    if (place_alone(item, v)) return v;
    refresh_bag_of(v);
    trees_.save(v, v, paths_);
    trees_.add(item, v);
    trees_.update(paths_);
    const double time = trees_.group_time(v);
    if (sharing_ == Sharing::kLeast ? has_room(v) : time <= target_) return v;
    trees_.restore(paths_);
    if (time < best_time) {
      best_time = time;
      best = v;
    }
  }
  KNAPFORMER_ASSERT(best >= 0);
  refresh_bag_of(best);
  trees_.add(item, best);
  for (int32_t v = best; v >= 0; v = trees_.node(v).parent) trees_.update(v);
  return best;
}

double GroupChooser::place_all(double target, Sharing sharing, std::vector<int32_t>& node_of_item) {
  target_ = sharing == Sharing::kMost ? 0 : target;
  sharing_ = sharing;
  trees_.clear();
  for (Queue& queue : queues_) queue.occupancy = WinnerTree(queue.nodes.size());
  is_stale_.assign(static_cast<size_t>(trees_.num_bags()), 0);
  node_of_item.clear();
  for (const TreeItem& item : trees_.items()) node_of_item.push_back(place(item));
  trees_.update_all();
  return trees_.slowest();
}

std::vector<int32_t> GroupChooser::place_under_targets(Sharing sharing, double bound, int32_t num_targets) {
  std::vector<int32_t> best, trial;
  double best_time = kInfinity;
  double low = 0, high = 0;  // margins: missed, met
  double margin = 0.02;
  bool is_met = false;
  for (int32_t i = 0; i < num_targets && best_time > bound * Effort::kGoodEnough; ++i) {
    const double time = place_all(bound * (1 + margin), sharing, trial);
    if (time < best_time) {
      best.swap(trial);
      best_time = time;
    }
    if (time <= bound * (1 + margin)) {
      high = std::min(margin, time / bound - 1);
      is_met = true;
    } else {
      low = margin;
    }
    margin = is_met ? (low + high) / 2 : 2 * margin;
    if (is_met && high - low < 0.0005) break;
  }
  return best;
}

}  // namespace knapformer
