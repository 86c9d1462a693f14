// Stable sorting by 64-bit keys: for the planners, which sort many sequences every step.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

namespace knapformer {

struct KeyedIndex {
  uint64_t key = 0;
  int32_t index = 0;
};

/// Sorts ascending by key, ties by index. The items must come with ascending indices. A radix sort, least significant
/// digit first, which skips digits that are the same in all keys.
inline void sort_by_key(std::vector<KeyedIndex>& items) {
  constexpr size_t kFew = 64;  // below, comparing is faster than counting
  if (items.size() < kFew) {
    std::sort(items.begin(), items.end(), [](const KeyedIndex& a, const KeyedIndex& b) {
      return a.key != b.key ? a.key < b.key : a.index < b.index;
    });
    return;
  }
  constexpr int kDigitBits = 8, kNumDigits = 8;
  constexpr size_t kNumValues = size_t{1} << kDigitBits;
  uint64_t varying = 0;  // bits
  for (const KeyedIndex& item : items) varying |= item.key ^ items[0].key;
  std::array<uint32_t, kNumValues> count;
  std::vector<KeyedIndex> sorted(items.size());
  for (int d = 0; d < kNumDigits; ++d) {
    if ((varying >> (d * kDigitBits) & (kNumValues - 1)) == 0) continue;
    count.fill(0);
    for (const KeyedIndex& item : items) ++count[item.key >> (d * kDigitBits) & (kNumValues - 1)];
    uint32_t offset = 0;
    for (uint32_t& c : count) {
      const uint32_t here = c;
      c = offset;
      offset += here;
    }
    for (const KeyedIndex& item : items) sorted[count[item.key >> (d * kDigitBits) & (kNumValues - 1)]++] = item;
    items.swap(sorted);
  }
}

}  // namespace knapformer
