#include "knapformer/core/plan/mask_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/core/cases.h"
#include "tests/core/masks.h"
#include "tests/core/refusals.h"

namespace knapformer {
namespace {

/// Whole sequences, or a part of each, packed: with what each query should see.
struct Packed {
  MaskRows rows;
  Dense seen;
};

Packed packed(Cases& cases, int64_t max_len) {
  Packed made;
  std::vector<std::pair<Dense, QueryPart>> sequences;
  for (int64_t count = cases.integer(1, 4); count > 0; --count) {
    const int64_t length = cases.integer(1, max_len);
    const Mask mask = cases.mask(length);
    const auto num_parts = static_cast<int32_t>(cases.integer(1, 3));
    const QueryPart part = mask.query_parts(length, num_parts)[static_cast<size_t>(cases.integer(0, num_parts - 1))];
    made.rows.add(mask, length, part);
    sequences.emplace_back(dense(mask.runs(length), length), part);
  }
  int64_t first_key = 0;
  for (const auto& [of_sequence, part] : sequences) {
    for (int64_t i = part.first_query; i < part.first_query + part.num_queries; ++i) {
      std::vector<bool>& keys = made.seen.emplace_back(made.rows.num_keys);
      for (int64_t j = 0; j < part.num_keys; ++j)
        keys[static_cast<size_t>(first_key + j)] = of_sequence[i][static_cast<size_t>(part.first_key + j)];
    }
    first_key += part.num_keys;
  }
  return made;
}

TEST(MaskRows, QueriesSeeThePackedKeysOfTheirSequence) {
  Cases cases(11);
  for (int round = 0; round < 200; ++round) {
    const Packed made = packed(cases, 30);
    EXPECT_EQ(std::ssize(made.seen), made.rows.num_queries);
    EXPECT_EQ(dense(made.rows.runs, made.rows.num_keys), made.seen);
  }
}

std::vector<std::pair<int32_t, int32_t>> pairs_of(const BlockLists& lists, bool swapped) {
  std::vector<std::pair<int32_t, int32_t>> pairs;
  for (size_t block = 0; block < lists.counts.size(); ++block) {
    const size_t width = lists.indices.size() / lists.counts.size();
    for (int32_t i = 0; i < lists.counts[block]; ++i) {
      const int32_t other = lists.indices[block * width + static_cast<size_t>(i)], own = static_cast<int32_t>(block);
      pairs.push_back(swapped ? std::pair(other, own) : std::pair(own, other));
    }
  }
  std::ranges::sort(pairs);
  return pairs;
}

TEST(MaskRows, BlocksAreThoseOfTheDenseMask) {
  Cases cases(12);
  int64_t num_all = 0;
  for (int round = 0; round < 200; ++round) {
    const Packed made = packed(cases, 60);
    const int64_t size = cases.integer(1, 9);
    const MaskBlocks blocks = MaskBlocks::of(made.rows, size);
    std::vector<std::pair<int32_t, int32_t>> some, all;
    for (int64_t q = 0; q * size < made.rows.num_queries; ++q) {
      for (int64_t k = 0; k * size < made.rows.num_keys; ++k) {
        int64_t pairs = 0;
        for (int64_t i = q * size; i < std::min(made.rows.num_queries, (q + 1) * size); ++i) {
          for (int64_t j = k * size; j < std::min(made.rows.num_keys, (k + 1) * size); ++j) pairs += made.seen[i][j];
        }
        if (pairs > 0) (pairs == size * size ? all : some).emplace_back(q, k);
      }
    }
    auto found = pairs_of(blocks.some_keys, false);
    const auto whole = pairs_of(blocks.all_keys, false);
    EXPECT_EQ(found, pairs_of(blocks.some_queries, true));
    EXPECT_EQ(whole, pairs_of(blocks.all_queries, true));
    // A block that several ranges fill, one of which moves, may count as seen in part: a kernel looks at each pair
    // then.
    EXPECT_TRUE(std::ranges::includes(all, whole));
    found.insert(found.end(), whole.begin(), whole.end());
    some.insert(some.end(), all.begin(), all.end());
    std::ranges::sort(found);
    std::ranges::sort(some);
    EXPECT_EQ(found, some);
    num_all += std::ssize(whole);
    EXPECT_TRUE(size == 1 || 2 * std::ssize(whole) >= std::ssize(all));
  }
  EXPECT_GT(num_all, 1000);
}

TEST(MaskRows, MasksThatDoNotSayWhichKeysAreSeenAreRefused) {
  const Mask density = Mask::parse("density:0.5");
  const QueryPart whole{.first_query = 0, .num_queries = 4, .first_key = 0, .num_keys = 4};
  const std::string words = "mask: got 'density:0.5', expected a mask that says which keys";
  EXPECT_TRUE(refusal_of([&] { MaskRows().add(density, 4, whole); }).starts_with(words));

  PlanInput input{.seq_lens = SequenceLengths::from_lists({{4}, {6}})};
  EXPECT_EQ(refusal_of([&] { check_masks_run(input); }), "");  // full attention
  input.give_masks({Mask::parse("causal"), density});
  EXPECT_TRUE(refusal_of([&] { check_masks_run(input); }).starts_with(words));
}

}  // namespace
}  // namespace knapformer
