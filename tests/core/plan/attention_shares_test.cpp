#include "knapformer/core/plan/attention_shares.h"

#include <gtest/gtest.h>

#include <numeric>

#include "knapformer/core/util/error.h"

namespace knapformer {
namespace {

/// What grouped-query attention needs, for every count of heads and ranks: each query head on one rank, shares even,
/// and on each rank the i-th of its n key/value heads serves exactly the i-th n-th of its query heads.
TEST(Heads, EveryRankComputesGroupedQueryAttentionOfItsShare) {
  for (int heads = 1; heads <= 24; ++heads) {
    for (int kv_heads = 1; kv_heads <= heads; ++kv_heads) {
      if (heads % kv_heads != 0) continue;
      const int per_kv = heads / kv_heads;
      for (int degree = 1; degree <= 9; ++degree) {
        SCOPED_TRACE(testing::Message() << heads << " heads, " << kv_heads << " kv heads, degree " << degree);
        const HeadPartition partition = partition_heads(heads, kv_heads, degree);
        std::vector<int32_t> all(static_cast<size_t>(heads));
        std::iota(all.begin(), all.end(), 0);
        EXPECT_EQ(partition.query.heads.values, all);
        for (int i = 0; i < degree; ++i) {
          const auto query = partition.query.of(i), key_value = partition.key_value.of(i);
          if (query.empty()) {
            EXPECT_TRUE(key_value.empty());
            continue;
          }
          ASSERT_FALSE(key_value.empty());
          ASSERT_EQ(query.size() % key_value.size(), 0u);
          const size_t ratio = query.size() / key_value.size();
          for (size_t h = 0; h < query.size(); ++h) EXPECT_EQ(key_value[h / ratio], query[h] / per_kv);
          const int unit = kv_heads >= degree ? per_kv : 1;
          const int units = heads / unit;
          EXPECT_LE(static_cast<int>(query.size()), (units + degree - 1) / degree * unit);
          EXPECT_GE(static_cast<int>(query.size()), units / degree * unit);
        }
        EXPECT_FALSE(partition.query.has_duplicates());
        EXPECT_EQ(partition.key_value.has_duplicates(),
                  partition.key_value.heads.values.size() > static_cast<size_t>(kv_heads));
      }
    }
  }
}

TEST(Heads, RefusesWhatIsNoGroupedQueryAttention) {
  EXPECT_THROW(partition_heads(8, 3, 2), ArgumentError);
  EXPECT_THROW(partition_heads(0, 1, 2), ArgumentError);
  EXPECT_THROW(partition_heads(8, 0, 2), ArgumentError);
  EXPECT_THROW(partition_heads(4, 8, 2), ArgumentError);
}

}  // namespace
}  // namespace knapformer
