#include "knapformer/core/planners/balanced/branch_and_bound.h"

#include <algorithm>
#include <tuple>

#include "knapformer/core/util/interrupt.h"

namespace knapformer {
namespace {

/// Places items by descending work, each in every group in turn, the fastest first, and leaves a branch as soon as no
/// placement in it can be faster than the best one so far.
class BranchAndBound {
 public:
  BranchAndBound(PlacementTrees& trees, std::span<const int32_t> groups, std::vector<int32_t>& node_of_item,
                 double good_enough)
      : trees_(trees),
        groups_(groups),
        best_(node_of_item),
        node_(node_of_item),
        good_enough_(good_enough),
        rest_(node_of_item.size() + 1) {
    for (size_t i = node_.size(); i-- > 0;) {
      double least = kInfinity;
      for (const int32_t v : groups) {
        const PlacementTrees::Node& n = trees.node(v);
        const TreeItem& item = trees.items()[i];
        least = std::min(least, n.degree * (item.tokens * n.time_per_token + item.attention * n.attention_share));
      }
      rest_[i] = rest_[i + 1] + least;
    }
  }

  bool run(int64_t num_trials) {
    trees_.put(best_);
    best_time_ = trees_.slowest();
    trials_left_ = num_trials;
    trees_.clear();
    place(0, trees_.slowest());
    return trials_left_ > 0;
  }

 private:
  void place(size_t i, double slowest) {
    if (i == node_.size()) {
      best_time_ = slowest;
      best_ = node_;
      return;
    }
    std::vector<int32_t> nodes(groups_.begin(), groups_.end());
    double room = 0;  // time of ranks, below the best so far, where an item fits
    for (const int32_t v : nodes) {
      const double left = trees_.node(v).degree * (best_time_ - trees_.state(v).time);
      if (left > rest_[node_.size() - 1]) room += left;
    }
    if (room <= rest_[i]) return;
    std::ranges::stable_sort(nodes, {}, [&](int32_t v) { return trees_.state(v).time; });
    for (size_t k = 0; k < nodes.size() && best_time_ > good_enough_; ++k) {
      const int32_t v = nodes[k];
      if (k > 0 && is_like(v, nodes[k - 1])) continue;
      if (--trials_left_ <= 0) return;
      checks_.count(20);
      trees_.add(trees_.items()[i], v);
      trees_.update(v);
      const double time = std::max(slowest, trees_.state(v).time);
      node_[i] = v;
      if (time < best_time_ * (1 - 1e-12)) place(i + 1, time);
      trees_.remove(trees_.items()[i], v);
      trees_.update(v);
    }
  }

  /// Whether two groups would take any item alike.
  bool is_like(int32_t a, int32_t b) const {
    const auto figures = [&](int32_t v) {
      const PlacementTrees::Node& n = trees_.node(v);
      return std::tuple(trees_.state(v).time, trees_.state(v).tokens, n.degree, n.time_per_token, n.exchange_per_token);
    };
    return figures(a) == figures(b);
  }

  PlacementTrees& trees_;
  std::span<const int32_t> groups_;
  std::vector<int32_t>& best_;
  std::vector<int32_t> node_;
  double good_enough_;
  double best_time_ = 0;
  int64_t trials_left_ = 0;
  InterruptChecks checks_;
  std::vector<double> rest_;  // by item: the least time of ranks that it and those after it take
};

}  // namespace

bool place_few(PlacementTrees& trees, std::span<const int32_t> groups, std::vector<int32_t>& node_of_item,
               double good_enough, int64_t num_moves) {
  // With 24 in bags of a rank, branch and bound takes a millisecond at default effort. With 12, plans of up to 24
  // sequences are 0.4 % slower, and 1.5 % at low effort; with 48 they are the same.
  constexpr int32_t kFewItems = 24;
  // Without kTrials plans of up to 24 sequences at low effort are 2 % slower; half or double of either: 0.1 %.
  constexpr int64_t kTrials = 4000, kTrialsPerMove = 4;
  if (std::max(std::ssize(node_of_item), std::ssize(groups)) > kFewItems) return false;
  return BranchAndBound(trees, groups, node_of_item, good_enough).run(kTrials + kTrialsPerMove * num_moves);
}

}  // namespace knapformer
