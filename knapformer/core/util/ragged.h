// Ragged arrays: lists of different lengths, one after another in one array.
#pragma once

#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

namespace knapformer {

template <class T>
struct Ragged {
  std::vector<T> values;
  std::vector<int32_t> offsets = {0};  // where each list begins in `values`, and the end

  int32_t size() const { return static_cast<int32_t>(offsets.size()) - 1; }
  std::span<const T> of(int32_t list) const {
    return std::span(values).subspan(offsets[list], offsets[list + 1] - offsets[list]);
  }
  /// Makes a list of what was appended to `values` since the last one.
  void end_list() { offsets.push_back(static_cast<int32_t>(values.size())); }

  bool operator==(const Ragged&) const = default;
};

/// Puts each number of [0, count) into list `list_of(number)`. Each list is ascending. O(count + lists).
template <class ListOf>
Ragged<int32_t> grouped(int32_t num_lists, int32_t count, ListOf list_of) {
  Ragged<int32_t> groups{.values = std::vector<int32_t>(count), .offsets = std::vector<int32_t>(num_lists + 1)};
  for (int32_t i = 0; i < count; ++i) ++groups.offsets[list_of(i) + 1];
  std::partial_sum(groups.offsets.begin(), groups.offsets.end(), groups.offsets.begin());
  std::vector<int32_t> next = groups.offsets;
  for (int32_t i = 0; i < count; ++i) groups.values[next[list_of(i)]++] = i;
  return groups;
}

}  // namespace knapformer
