#include "knapformer/core/model/data_mix.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "tests/core/refusals.h"

namespace knapformer {
namespace {

/// Figure 3 of the paper: the average visual tokens of a sample.
TEST(DataMix, VisualTokensAreThoseOfThePaper) {
  const DataMix joint = DataMix::parse("joint");
  const std::vector<int64_t> expected = {256, 1024, 4096, 16384, 1024, 4096, 6400, 25600};
  ASSERT_EQ(joint.codes().size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_EQ(joint.codes()[i].visual_tokens(), expected[i]);
  EXPECT_EQ(joint.num_ranks(), 32);
}

/// Published: 369.7 thousand tokens a step for the joint mix, 147.63 thousand/s * 3.13 s for low, 58.58 * 4.64 for
/// mixed.
TEST(DataMix, TokensPerStepAreThoseOfThePaper) {
  for (const auto& [name, tokens] :
       {std::pair{"joint", 369.7e3}, {"low", 147.63e3 * 3.13}, {"mixed", 58.58e3 * 4.64}}) {
    double sum = 0;
    for (int64_t step = 0; step < 50; ++step) {
      for (const auto& lens : DataMix::parse(name).draw_lengths(0, step, 32)) {
        sum += static_cast<double>(std::accumulate(lens.begin(), lens.end(), int64_t{0}));
      }
    }
    EXPECT_NEAR(sum / 50 / tokens, 1, 0.01) << name;
  }
}

TEST(DataMix, DrawsWithinTheStatedRangesAndOneFactorABatch) {
  const DataMix mix = DataMix::parse("g1b64i1024f1s0");
  int64_t min_visual = 1 << 20, max_visual = 0, min_text = 1 << 20, max_text = 0;
  for (int64_t step = 0; step < 500; ++step) {
    const auto samples = mix.draw(7, step, Rank(0));
    ASSERT_EQ(samples.size(), 64u);
    for (const Sample& s : samples) {
      EXPECT_EQ(s.visual_tokens, samples[0].visual_tokens);
      min_visual = std::min(min_visual, s.visual_tokens);
      max_visual = std::max(max_visual, s.visual_tokens);
      min_text = std::min(min_text, s.text_tokens);
      max_text = std::max(max_text, s.text_tokens);
    }
  }
  EXPECT_GE(min_visual, 3932);  // 0.96 * 4096, rounded down
  EXPECT_LE(max_visual, 4259);
  EXPECT_LT(min_visual, 3942);
  EXPECT_GT(max_visual, 4250);
  EXPECT_EQ(min_text, 0);
  EXPECT_EQ(max_text, 392);
}

TEST(DataMix, IsTheSameOnAnyMachine) {
  // Written down from the first version: a change of these numbers changes everybody's benchmark.
  const auto samples = DataMix::parse("joint").draw(42, 3, Rank(31));
  ASSERT_EQ(samples.size(), 1u);
  EXPECT_EQ(samples[0], (Sample{.text_tokens = 199, .visual_tokens = 26617}));
  EXPECT_EQ(DataMix::parse("joint").draw(42, 3, Rank(31)), samples);
  EXPECT_NE(DataMix::parse("joint").draw(43, 3, Rank(31)), samples);
  EXPECT_NE(DataMix::parse("joint").draw(42, 4, Rank(31)), samples);
}

TEST(DataMix, CodesRepeatOverTheWorld) {
  const DataMix mix = DataMix::parse("g1b2i256f1s0,g2b3i512f1s0");
  for (int r = 0; r < 9; ++r) EXPECT_EQ(mix.draw(0, 0, Rank(r)).size(), r % 3 == 0 ? 2u : 3u);
  EXPECT_EQ(mix.draw_lengths(0, 0, 9)[4].size(), 3u);
  EXPECT_THROW(mix.draw_lengths(0, 0, 8), ArgumentError);
  EXPECT_THROW(mix.draw_lengths(0, 0, 0), ArgumentError);
}

TEST(DataMix, RefusesMoreSamplesThanFit) {
  for (const char* codes : {"g1048576b1048576i256f1s0", "g1b1048576i256f1s0,g16b1048576i256f1s0"}) {
    const DataMix mix = DataMix::parse(codes);
    EXPECT_THROW(mix.draw_lengths(0, 0, mix.num_ranks()), ArgumentError);
  }
  const DataMix mix = DataMix::parse("g1b4096i256f1s0");
  EXPECT_EQ(mix.draw_lengths(0, 0, 2).size(), 2U);
  EXPECT_THROW(mix.draw_lengths(0, 0, 4097), ArgumentError);
}

TEST(DataMix, ScaleDividesResolutions) {
  EXPECT_EQ(DataMix::parse("g1b1i2048f1s0", 8).codes()[0].visual_tokens(), 256);
  EXPECT_EQ(DataMix::parse("g1b1i256f1s0", 1000).codes()[0].visual_tokens(), 1);
  EXPECT_EQ(DataMix::parse("mixed", 1).str(), "g16b4i256f1s0,g4b5i512f1s0,g4b5i1024f1s0,g8b1i2048f1s0");
  for (const Sample& s : DataMix::parse("g1b50i256f1s0", 1, 0).draw(0, 0, Rank(0))) EXPECT_EQ(s.text_tokens, 0);
}

class MalformedMix : public testing::TestWithParam<const char*> {};

TEST_P(MalformedMix, IsRefusedByName) {
  const std::string refusal = refusal_of([] { DataMix::parse(GetParam()); });
  EXPECT_TRUE(refusal.starts_with("data: got '")) << refusal;
}

INSTANTIATE_TEST_SUITE_P(All, MalformedMix,
                         testing::Values("", "high", "g1", "g1b1i256f1", "g1b1i256f1s2", "g0b1i256f1s0", "g1b0i256f1s0",
                                         "g1b1i256f0s0", "g1b1i256f1s0,", "g1b1i256f1s0;g1b1i256f1s0", "g1b1i256f1s0x",
                                         "g-1b1i256f1s0", "g1b1i2.5f1s0"));

TEST(DataMix, RefusesBadScales) {
  for (const double scale :
       {0.0, -1.0, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_THROW(DataMix::parse("low", scale), ArgumentError);
  }
  EXPECT_THROW(DataMix::parse("low", 1, -1), ArgumentError);
}

}  // namespace
}  // namespace knapformer
