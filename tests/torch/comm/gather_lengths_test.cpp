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
      : gatherer(CommGroup::make("lengths", world.all(rank), "gather_lengths_test",
                                 std::make_shared<Watchdog>(world.all(rank)->getStore(), rank))) {}
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
    const auto r = static_cast<size_t>(rank);
    const GatheredLengths all =
        self.gather(lens[r], {.lengths = {},
                              .masks = masks[r],
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
    EXPECT_TRUE(self.gather(lens[r]).masks.empty());
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

TEST(GatherLengths, TellsGivenWorkBitForBit) {
  testing::InProcessWorld world(3);
  world.run_all([&](int32_t rank) {
    Member self(world, rank);
    const std::vector<std::vector<int64_t>> lens = {{5, 6}, {}, {7}};
    const std::vector<std::vector<double>> work = {{0.1, 1e30}, {}, {1e-30}};
    const auto r = static_cast<size_t>(rank);
    const GatheredLengths all = self.gather(lens[r], {.lengths = {}, .masks = {}, .work = work[r]});
    EXPECT_EQ(all.work, (std::vector{0.1, 1e30, 1e-30}));
    EXPECT_TRUE(self.gather(lens[r]).work.empty());
    // Beside the others' masks, and beyond the first capacity.
    const std::vector<int64_t> many(100, 3);
    const std::vector<std::optional<Mask>> masks(rank == 1 ? 100 : 0, Mask::parse("c1 f2"));
    std::vector<double> of_many(100);
    std::iota(of_many.begin(), of_many.end(), 0.5 + 1000 * rank);
    const GatheredLengths long_ones = self.gather(many, {.lengths = {}, .masks = masks, .work = of_many});
    ASSERT_EQ(long_ones.work.size(), 300);
    EXPECT_EQ(long_ones.work[101], 1001.5);
    EXPECT_EQ(long_ones.work[299], 2099.5);
  });
}

TEST(GatherLengths, WorkOfSomeRanksAloneIsAnErrorOnAll) {
  testing::InProcessWorld world(3);
  world.run_all([&](int32_t rank) {
    Member self(world, rank);
    const std::vector<int64_t> lens(rank == 1 ? 0 : 2, 5);
    const std::vector<double> work(rank == 2 ? 2 : 0, 1.0);
    try {
      self.gather(lens, {.lengths = {}, .masks = {}, .work = work});
      ADD_FAILURE() << "no error on rank " << rank;
    } catch (const ArgumentError& error) {
      EXPECT_STREQ(error.what(),
                   "work: got none on rank 0, expected that of each sequence, as on rank 2, or none on any rank");
    }
  });
}

TEST(GatherLengths, TellsTheBytesOfSamples) {
  testing::InProcessWorld world(3);
  world.run_all([&](int32_t rank) {
    Member self(world, rank);
    const std::vector<std::vector<int64_t>> lens = {{5, 6}, {}, {7}};
    const std::vector<std::vector<SampleBytes>> bytes = {{{32, 4}, {48, 8}}, {}, {{64, 2}}};
    const auto r = static_cast<size_t>(rank);
    const std::vector<std::optional<Mask>> masks(lens[r].size(), Mask::parse("causal"));
    const GatheredLengths all = self.gather(lens[r], {.lengths = {}, .masks = masks, .sample_bytes = bytes[r]});
    ASSERT_EQ(all.sample_bytes.size(), 3);
    for (const size_t i : {0, 1, 2}) {
      const SampleBytes& expected = i < 2 ? bytes[0][i] : bytes[2][0];
      EXPECT_EQ(all.sample_bytes[i].fixed, expected.fixed);
      EXPECT_EQ(all.sample_bytes[i].per_token, expected.per_token);
    }
    for (const std::optional<Mask>& mask : all.masks) EXPECT_EQ(mask, Mask::parse("causal"));
    EXPECT_TRUE(self.gather(lens[r]).sample_bytes.empty());
  });
}

TEST(GatherLengths, NamesAWidthThatDiffers) {
  testing::InProcessWorld world(2);
  for (const auto& error : world.run([&](int32_t rank) { Member(world, rank).gather({1}, {}, rank == 0 ? 8 : 9); })) {
    EXPECT_EQ(testing::describe(error), "ArgumentError: d_model: got 9 on rank 1, expected 8, as on rank 0");
  }
}

}  // namespace
}  // namespace knapformer
