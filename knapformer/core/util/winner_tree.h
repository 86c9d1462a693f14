// The minimum of many keys that change one at a time: for planners, which put each sequence where the load is lowest so
// far.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "knapformer/core/util/error.h"

namespace knapformer {

/// A tournament: the node above a pair holds the lower key; of equal keys, the one with the lower index. A changed key
/// is compared along the one path from its leaf to the root. That path is known beforehand. The path down a heap is
/// not, and processors mispredict it half the time.
class WinnerTree {
 public:
  /// `count` keys of 0; at least one.
  explicit WinnerTree(size_t count) : width_(std::bit_ceil(count)), nodes_(2 * width_) {
    for (size_t i = 0; i < width_; ++i) {
      nodes_[width_ + i] = {.key = i < count ? 0 : kInfinity, .index = static_cast<int32_t>(i)};
    }
    for (size_t i = width_ - 1; i > 0; --i) nodes_[i] = nodes_[2 * i];
  }

  int32_t winner() const { return nodes_[1].index; }
  double min() const { return nodes_[1].key; }

  void set_min(double key) { set(winner(), key); }
  void set(int32_t index, double key) {
    Node best{.key = key, .index = index};
    size_t i = width_ + static_cast<size_t>(best.index);
    nodes_[i] = best;
    for (; i > 1; i /= 2) {
      const Node& other = nodes_[i ^ 1];
      const bool loses = (other.key < best.key) | ((other.key == best.key) & ((i & 1) != 0));
      best.key = loses ? other.key : best.key;
      best.index = loses ? other.index : best.index;
      nodes_[i / 2] = best;
    }
  }

 private:
  struct Node {
    double key = 0;
    int32_t index = 0;
  };
  size_t width_;
  std::vector<Node> nodes_;  // the children of i are 2 i and 2 i + 1; keys are the last `width_`
};

}  // namespace knapformer
