#include "knapformer/torch/comm/gather_lengths.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <numeric>

#include "knapformer/core/util/error.h"
#include "tests/torch/in_process_group.h"

namespace knapformer {
namespace {

struct Member {
  LengthGatherer gatherer;

  Member(testing::InProcessWorld& world, int32_t rank)
      : gatherer(CommGroup::make(world.all(rank), "gather_lengths_test",
                                 std::make_shared<PeerErrors>(world.all(rank)->getStore(), rank))) {}
  GatheredLengths gather(const std::vector<int64_t>& lens, GatheredLengths beside = {}, int64_t d_model = 8) {
    const auto count = static_cast<int64_t>(lens.size());
    beside.lengths = SequenceLengths(lens, std::span(&count, 1));
    return gatherer.finish(gatherer.start(std::move(beside), d_model));
  }
};

std::vector<int64_t> lens_of(const GatheredLengths& gathered, int32_t rank) {
  const auto lens = gathered.lengths.lens(Rank(rank));
  return {lens.begin(), lens.end()};
}

TEST(GatherLengths, TellsEachRankWhatAllRanksSay) {
  testing::InProcessWorld world(3);
  world.run_all([&](int32_t rank) {
    Member self(world, rank);
    const std::vector<std::vector<int64_t>> lens = {{5, 6}, {}, {7, 9, 8}};
    std::vector<std::vector<std::optional<Mask>>> masks(3);
    for (const char* text : {"c5 f2", "causal", "c5 f3"}) masks[2].emplace_back(Mask::parse(text));
    const std::vector<std::vector<double>> work = {{0.1, 1e30}, {}, {1e-30, 2, 3}};
    const std::vector<std::vector<SampleBytes>> bytes = {{{32, 4}, {48, 8}}, {}, {{64, 2}, {80, 1}, {16, 3}}};
    const auto r = static_cast<size_t>(rank);
    const GatheredLengths all =
        self.gather(lens[r], {.lengths = {},
                              .masks = masks[r],
                              .work = work[r],
                              .sample_bytes = bytes[r],
                              .statuses = {rank == 1 ? DataStatus::kEnded : DataStatus::kActive},
                              .observed = {{.first_plan = rank, .last_plan = 2 * rank, .seconds = 0.5 * rank}}});
    for (int32_t other = 0; other < 3; ++other) {
      EXPECT_EQ(lens_of(all, other), lens[static_cast<size_t>(other)]);
      EXPECT_EQ(all.observed[static_cast<size_t>(other)].first_plan, other);
      EXPECT_EQ(all.observed[static_cast<size_t>(other)].last_plan, 2 * other);
      EXPECT_EQ(all.observed[static_cast<size_t>(other)].seconds, 0.5 * other);
    }
    EXPECT_EQ(all.statuses, (std::vector{DataStatus::kActive, DataStatus::kEnded, DataStatus::kActive}));
    ASSERT_EQ(all.masks.size(), 5);
    EXPECT_FALSE(all.masks[0] || all.masks[1]);
    for (size_t s = 0; s < 3; ++s) EXPECT_EQ(all.masks[2 + s], masks[2][s]);
    EXPECT_EQ(all.work, (std::vector{0.1, 1e30, 1e-30, 2.0, 3.0}));
    ASSERT_EQ(all.sample_bytes.size(), 5);
    for (size_t s = 0; s < 5; ++s) {
      const SampleBytes& expected = s < 2 ? bytes[0][s] : bytes[2][s - 2];
      EXPECT_EQ(std::pair(all.sample_bytes[s].fixed, all.sample_bytes[s].per_token),
                std::pair(expected.fixed, expected.per_token));
    }
    const GatheredLengths none = self.gather(lens[r]);
    EXPECT_TRUE(none.masks.empty() && none.work.empty() && none.sample_bytes.empty());
  });
}

TEST(GatherLengths, GrowsItsBufferOnAllRanksTogether) {
  testing::InProcessWorld world(3);
  world.run_all([&](int32_t rank) {
    Member self(world, rank);
    int64_t expected_gathers = 0;
    const auto gather = [&](int64_t count_on_rank_1, int64_t num_gathers) {
      std::vector<int64_t> lens(static_cast<size_t>(rank == 1 ? count_on_rank_1 : 2));
      std::iota(lens.begin(), lens.end(), 1);
      const GatheredLengths all = self.gather(lens);
      EXPECT_EQ(all.lengths.num_sequences(), count_on_rank_1 + 4);
      EXPECT_EQ(lens_of(all, rank), lens);
      EXPECT_EQ(world.counts(rank).all_gather, expected_gathers += num_gathers);
    };
    gather(64, 1);
    gather(65, 2);  // one more than fits at first
    gather(128, 1);
    gather(5000, 2);
    gather(0, 1);
  });
}

}  // namespace
}  // namespace knapformer
