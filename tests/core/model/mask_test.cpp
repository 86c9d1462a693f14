#include "knapformer/core/model/mask.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "knapformer/core/util/error.h"

namespace knapformer {
namespace {

/// Whether query i sees key j, from the words of the definition.
bool sees(const Mask& mask, int64_t i, int64_t j) {
  switch (mask.kind) {
    case Mask::Kind::kFull:
      return true;
    case Mask::Kind::kCausal:
      return j <= i;
    case Mask::Kind::kPrefix:
      return j <= i || (i < mask.text_tokens && j < mask.text_tokens);
    case Mask::Kind::kBlockCausal: {
      const auto block = [&](int64_t t) {
        return t < mask.text_tokens ? -1 : (t - mask.text_tokens) / mask.frame_tokens;
      };
      return block(j) <= block(i);
    }
    case Mask::Kind::kWindow:
      return (mask.left < 0 || i - j <= mask.left) && (mask.right < 0 || j - i <= mask.right);
    case Mask::Kind::kDensity:
      break;  // says nothing of single pairs
  }
  return false;
}

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
    for (const int64_t right : {-1, 0, 3, 60})
      masks.push_back({.kind = Mask::Kind::kWindow, .left = text, .right = right});
  }
  masks.push_back({.kind = Mask::Kind::kWindow, .left = -1, .right = 2});
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
  try {
    Mask::parse(GetParam());
    FAIL();
  } catch (const ArgumentError& error) {
    EXPECT_TRUE(std::string(error.what()).starts_with("mask: got '" + std::string(GetParam()) + "'")) << error.what();
  }
}

INSTANTIATE_TEST_SUITE_P(All, MalformedMask,
                         testing::Values("", "ful", "full:1", "causal:", "prefix", "prefix:", "prefix:-1", "prefix:1:2",
                                         "block_causal:3", "block_causal:3:0", "window:3", "window:3:x",
                                         "window:3:99999999999", "density", "density:", "density:1.5", "density:-0.5",
                                         "density:nan", "density:.5:1"));

}  // namespace
}  // namespace knapformer
