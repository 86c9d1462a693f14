// The minimum of many keys that change one at a time: for planners, which put each sequence where the load is lowest so
// far.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "knapformer/core/util/error.h"

namespace knapformer {

/// A tournament: the node above a pair holds the lower key; of equal keys, the one with the lower index. A changed key
/// is compared along the one path from its leaf to the root. That path is known beforehand. The path down a heap is
/// not, and processors mispredict it half the time.
class WinnerTree {
 public:
  /// At least one key.
  explicit WinnerTree(std::span<const double> keys) : width_(std::bit_ceil(keys.size())), nodes_(2 * width_) {
    for (size_t i = 0; i < width_; ++i) {
      nodes_[width_ + i] = {.key = i < keys.size() ? keys[i] : kInfinity, .index = static_cast<int32_t>(i)};
    }
    for (size_t i = width_ - 1; i > 0; --i) nodes_[i] = nodes_[2 * i + (nodes_[2 * i + 1].key < nodes_[2 * i].key)];
  }
  /// `count` keys of 0.
  explicit WinnerTree(size_t count) : WinnerTree(std::vector<double>(count)) {}

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
