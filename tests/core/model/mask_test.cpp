#include "knapformer/core/model/mask.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "tests/core/masks.h"
#include "tests/core/refusals.h"

namespace knapformer {
namespace {

int64_t brute_count(const Mask& mask, int64_t seq_len) {
  int64_t pairs = 0;
  for (int64_t i = 0; i < seq_len; ++i) {
    for (int64_t j = 0; j < seq_len; ++j) pairs += sees(mask, i, j) ? 1 : 0;
  }
  return pairs;
}

std::vector<Mask> some_masks() {
  std::vector<Mask> masks = {{.kind = Mask::Kind::kFull}, {.kind = Mask::Kind::kCausal}};
  for (const int64_t text : {0, 1, 5, 17, 40}) {
    masks.push_back({.kind = Mask::Kind::kPrefix, .text_tokens = text});
    for (const int64_t frame : {1, 2, 7, 50}) {
      masks.push_back({.kind = Mask::Kind::kBlockCausal, .text_tokens = text, .frame_tokens = frame});
    }
    for (const int64_t right : {0, 3, 60}) masks.push_back({.kind = Mask::Kind::kWindow, .left = text, .right = right});
  }
  return masks;
}

TEST(Mask, PairsAreThoseOfABruteCount) {
  for (const Mask& mask : some_masks()) {
    for (int64_t length = 1; length <= 45; ++length) {
      EXPECT_EQ(mask.pairs(length), brute_count(mask, length)) << mask.str() << ", " << length << " tokens";
    }
  }
}

TEST(Mask, PartsOfQueriesHaveEqualPairsAndTheirKeys) {
  for (const Mask& mask : some_masks()) {
    for (int64_t length = 1; length <= 45; ++length) {
      for (const int32_t num_parts : {1, 2, 3, 7}) {
        const std::vector<QueryPart> parts = mask.query_parts(length, num_parts);
        ASSERT_EQ(std::ssize(parts), num_parts);
        int64_t next = 0, most = 0, least = length * length;
        for (const QueryPart& part : parts) {
          EXPECT_EQ(part.first_query, next);
          next += part.num_queries;
          int64_t pairs = 0, first_key = length, last_key = -1;
          for (int64_t i = part.first_query; i < next; ++i) {
            for (int64_t j = 0; j < length; ++j) {
              if (!sees(mask, i, j)) continue;
              ++pairs;
              first_key = std::min(first_key, j);
              last_key = std::max(last_key, j);
            }
          }
          if (part.num_queries == 0) {
            EXPECT_EQ(part.num_keys, 0);
          } else {
            EXPECT_EQ(part.first_key, first_key) << mask.str() << ", " << length << " tokens";
            EXPECT_EQ(part.num_keys, last_key + 1 - first_key) << mask.str() << ", " << length << " tokens";
          }
          most = std::max(most, pairs);
          least = std::min(least, pairs);
        }
        EXPECT_EQ(next, length);
        EXPECT_LE(most - least, 2 * length) << mask.str() << ", " << length << " tokens";
      }
    }
  }
  const QueryPart last = Mask::parse("causal").query_parts(int64_t{1} << 31, 4)[3];
  EXPECT_NEAR(static_cast<double>(last.first_query), std::sqrt(0.75) * 0x1p31, 2);
}

TEST(Mask, RunsSayWhatEachQuerySees) {
  for (const Mask& mask : some_masks()) {
    for (int64_t length = 1; length <= 45; ++length) {
      const auto seen = dense(mask.runs(length), length);
      for (int64_t i = 0; i < length; ++i) {
        for (int64_t j = 0; j < length; ++j)
          ASSERT_EQ(seen[i][j], sees(mask, i, j)) << mask.str() << ", " << length << " tokens, " << i << " to " << j;
      }
    }
  }
}

/// A part of a sequence as the words of the text form have it.
struct Part {
  int64_t num_tokens;
  bool is_causal;
  std::vector<size_t> seen;  // beside itself
};

Dense dense(const std::vector<Part>& parts) {
  std::vector<size_t> part_of;
  for (size_t p = 0; p < parts.size(); ++p) part_of.insert(part_of.end(), static_cast<size_t>(parts[p].num_tokens), p);
  std::vector<std::vector<bool>> seen(part_of.size(), std::vector<bool>(part_of.size()));
  for (size_t i = 0; i < part_of.size(); ++i) {
    for (size_t j = 0; j < part_of.size(); ++j) {
      const Part& part = parts[part_of[i]];
      seen[i][j] = part_of[i] == part_of[j] ? !part.is_causal || j <= i
                                            : std::ranges::find(part.seen, part_of[j]) != part.seen.end();
    }
  }
  return seen;
}

void expect_written(const std::string& text, const Dense& expected) {
  const Mask mask = Mask::parse(text);
  EXPECT_EQ(mask.str(), text);
  const auto length = std::ssize(expected);
  EXPECT_EQ(dense(mask.runs(length), length), expected) << text;
  int64_t pairs = 0;
  for (const auto& keys : expected) pairs += std::ranges::count(keys, true);
  EXPECT_EQ(mask.pairs(length), pairs) << text;
  for (const int32_t num_parts : {1, 2, 3, 5}) {
    int64_t sum = 0;
    for (const QueryPart& part : mask.query_parts(length, num_parts)) {
      sum += mask.pairs_of(length, part);
      for (int64_t i = part.first_query; i < part.first_query + part.num_queries; ++i) {
        for (int64_t j = 0; j < length; ++j) {
          const bool comes = j >= part.first_key && j < part.first_key + part.num_keys;
          EXPECT_TRUE(comes || !expected[i][j]) << text << ", " << num_parts << " parts";
        }
      }
    }
    EXPECT_EQ(sum, pairs) << text << ", " << num_parts << " parts";
  }
}

TEST(Mask, PartsOfASequenceSeeWhatTheTextSays) {
  expect_written("c5 f8 c3 f9", dense({{5, true, {}}, {8, false, {0}}, {3, true, {0, 1}}, {9, false, {0, 1, 2}}}));
  expect_written("f4 f7@ f6@0 c2@0,2", dense({{4, false, {}}, {7, false, {}}, {6, false, {0}}, {2, true, {0, 2}}}));
  // A part that sees a later one; a causal one between parts that it sees.
  expect_written("f4@1-2 c7@0,2 f6@", dense({{4, false, {1, 2}}, {7, true, {0, 2}}, {6, false, {}}}));
  expect_written("f3@0", dense({{3, false, {}}}));  // itself is no news
  std::vector<Part> parts = {{3, true, {}}};
  for (size_t i = 0; i < 4; ++i) {
    parts.push_back({5, false, {0}});
    for (size_t j = 0; j < i; ++j) parts.back().seen.push_back(1 + j);
  }
  for (size_t i = 0; i < 4; ++i) parts.push_back({6, false, parts[1 + i].seen});
  expect_written("c3 clean:4x5 noisy:4x6", dense(parts));
}

TEST(Mask, RangesSeeWhatTheTextSays) {
  std::vector<std::vector<bool>> seen(7, std::vector<bool>(7));
  for (size_t i = 0; i < 3; ++i) {
    for (size_t j = i; j <= i; ++j) seen[i][j] = true;
    seen[i][6] = true;
  }
  for (size_t i = 4; i < 7; ++i) {
    for (size_t j = i - 3; j < i; ++j) seen[i][j] = true;
  }
  expect_written("ranges:3=0+-1+,6-7;1=;3=1+-4+", seen);
  expect_written("ranges:4=", std::vector<std::vector<bool>>(4, std::vector<bool>(4)));
}

TEST(Mask, MasksAreTheSameWhereEachQuerySeesTheSameKeys) {
  const int64_t length = 13;
  std::vector<Mask> masks = some_masks();
  for (const char* text : {"c13", "f13", "c5 f8", "f5 f5 f3", "ranges:13=0-1+", "ranges:13=0+-1+", "f5 c8@0"})
    masks.push_back(Mask::parse(text));
  for (const Mask& a : masks) {
    for (const Mask& b : masks) {
      const bool expected = dense(a.runs(length), length) == dense(b.runs(length), length);
      EXPECT_EQ(a.sees_as(b, length), expected) << a.str() << " and " << b.str();
    }
  }
  EXPECT_TRUE(Mask::parse("density:1").sees_as(Mask(), length));
  EXPECT_FALSE(Mask::parse("density:0.5").sees_as(Mask(), length));
}

TEST(Mask, AWrittenMaskIsOfOneLength) {
  const Mask mask = Mask::parse("c5 f8");
  EXPECT_EQ(mask, Mask::parse("c5 f8"));
  EXPECT_FALSE(mask == Mask::parse("c5 f9"));
  for (const std::string& refusal : {refusal_of([&] { mask.pairs(12); }), refusal_of([&] { mask.runs(14); })})
    EXPECT_TRUE(refusal.starts_with("mask: got 'c5 f8' for a sequence of 1")) << refusal;
}

TEST(Mask, LongSequencesDoNotOverflow) {
  const int64_t length = int64_t{1} << 31;
  EXPECT_EQ(Mask::parse("full").pairs(length), length * length);
  EXPECT_EQ(Mask::parse("causal").pairs(length), length / 2 * (length + 1));
  EXPECT_EQ(Mask::parse("block_causal:0:1").pairs(length), length / 2 * (length + 1));
}

TEST(Mask, ADensityIsAShareOfAllPairs) {
  EXPECT_EQ(Mask::parse("density:0.25").pairs(1000), 250'000);
  EXPECT_EQ(Mask::parse("density:0").pairs(1000), 0);
  EXPECT_EQ(Mask::parse("density:1").pairs(1000), 1'000'000);
  EXPECT_EQ(Mask::parse("density:0.5").pairs(int64_t{1} << 31), int64_t{1} << 61);
}

TEST(Mask, TextComesBack) {
  for (const char* text : {"full", "causal", "prefix:77", "block_causal:77:1024", "window:512:0", "density:0.125"}) {
    EXPECT_EQ(Mask::parse(text).str(), text);
  }
}

class MalformedMask : public testing::TestWithParam<const char*> {};

TEST_P(MalformedMask, IsRefusedByName) {
  const std::string refusal = refusal_of([] { Mask::parse(GetParam()); });
  EXPECT_TRUE(refusal.starts_with("mask: got '" + std::string(GetParam()) + "'")) << refusal;
}

INSTANTIATE_TEST_SUITE_P(All, MalformedMask,
                         testing::Values("", "ful", "full:1", "causal:", "prefix", "prefix:", "prefix:-1", "prefix:1:2",
                                         "block_causal:3", "block_causal:3:0", "window:3", "window:3:x",
                                         "window:3:99999999999", "density", "density:", "density:1.5", "density:-0.5",
                                         "density:nan", "density:.5:1", "c", "c0", "f5 ", "f5  f3", "f5,", "f5@1 x",
                                         "f5@1", "f5@0,0 f3", "f5@2-1 f3 f4", "f5@0, f3", "clean:3x5 noisy:4x5",
                                         "noisy:3x5", "clean:3x0", "clean:3", "clean:2x1 clean:2x1",
                                         "ranges:", "ranges:3", "ranges:3=0-4", "ranges:3=0-3+", "ranges:3=2-2",
                                         "ranges:3=0+-2", "ranges:3=0-2,1-3", "ranges:3=0-1+,1-3", "ranges:3=0-1;",
                                         "ranges:2147483647=;1="));

}  // namespace
}  // namespace knapformer
