// The tournament against looking at every key.
#include "knapformer/core/util/winner_tree.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace knapformer {
namespace {

TEST(WinnerTree, HasTheLeastKeyTheFirstOfEqualOnes) {
  std::mt19937 random(1);
  for (size_t count = 1; count <= 40; ++count) {
    WinnerTree tree(count);
    std::vector<double> keys(count, 0.0);
    for (int turn = 0; turn < 500; ++turn) {
      const auto least = std::min_element(keys.begin(), keys.end());
      ASSERT_EQ(tree.winner(), least - keys.begin()) << count << " keys, turn " << turn;
      ASSERT_EQ(tree.min(), *least);
      *least += static_cast<double>(random() % 4);  // often ties
      tree.set_min(*least);
      const size_t any = random() % count;
      keys[any] = static_cast<double>(random() % 4);
      tree.set(static_cast<int32_t>(any), keys[any]);
    }
  }
}

}  // namespace
}  // namespace knapformer
