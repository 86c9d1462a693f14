#include "knapformer/core/util/ragged.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace knapformer {
namespace {

TEST(Ragged, ListsAreWhatWasAppended) {
  Ragged<int> lists;
  EXPECT_EQ(lists.size(), 0);
  for (const std::vector<int>& list : {std::vector<int>{3, 1}, {}, {2}}) {
    lists.values.insert(lists.values.end(), list.begin(), list.end());
    lists.end_list();
    EXPECT_TRUE(std::ranges::equal(lists.of(lists.size() - 1), list));
  }
  EXPECT_EQ(lists, (Ragged<int>{.values = {3, 1, 2}, .offsets = {0, 2, 2, 3}}));
}

TEST(Ragged, GroupsAscend) {
  std::mt19937 random(1);
  for (int32_t count = 0; count < 40; ++count) {
    const int32_t num_lists = 1 + static_cast<int32_t>(random() % 7);
    std::vector<std::vector<int32_t>> expected(static_cast<size_t>(num_lists));
    std::vector<int32_t> keys;
    for (int32_t i = 0; i < count; ++i) {
      keys.push_back(static_cast<int32_t>(random() % 7) % num_lists);
      expected[keys.back()].push_back(i);
    }
    const Ragged<int32_t> groups = grouped(num_lists, count, [&](int32_t i) { return keys[i]; });
    ASSERT_EQ(groups.size(), num_lists);
    for (int32_t list = 0; list < num_lists; ++list) EXPECT_TRUE(std::ranges::equal(groups.of(list), expected[list]));
  }
}

}  // namespace
}  // namespace knapformer
