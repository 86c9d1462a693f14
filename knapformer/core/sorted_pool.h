// A sorted list whose elements are taken one by one, in time that does not depend on how many are equal.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace knapformer {

/// A sorted list whose runs of equal elements are used up from their front.
template <typename T>
class SortedPool {
 public:
  template <typename Less>
  void assign(std::span<const T> items, Less less) {
    items_.assign(items.begin(), items.end());
    if (!std::is_sorted(items_.begin(), items_.end(), less)) std::stable_sort(items_.begin(), items_.end(), less);
    num_used_.assign(items_.size(), 0);
  }
  std::span<const T> items() const { return items_; }
  /// The index of an element equal to `wanted` that was not taken before, or -1.
  template <typename Less>
  std::ptrdiff_t take(const T& wanted, Less less) {
    const auto first =
        static_cast<size_t>(std::lower_bound(items_.begin(), items_.end(), wanted, less) - items_.begin());
    if (first == items_.size() || less(wanted, items_[first])) return -1;
    const size_t next = first + num_used_[first];
    if (next == items_.size() || less(wanted, items_[next])) return -1;
    ++num_used_[first];
    return static_cast<std::ptrdiff_t>(next);
  }

 private:
  std::vector<T> items_;
  std::vector<uint32_t> num_used_;  // at the first of each run
};

}  // namespace knapformer
