#include "knapformer/core/planners/balanced/locality.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "knapformer/core/planners/balanced/uneven_chunks.h"
#include "knapformer/core/planners/planner.h"
#include "knapformer/core/util/error.h"
#include "tests/core/cases.h"
#include "tests/core/mixes.h"

namespace knapformer {
namespace {

/// Cuts as the solver does.
MicroBatchPlan plan_of(const PlanInput& in, const std::vector<Placement>& placements) {
  return MicroBatchPlan(in, "any", placements, uneven_chunk_lens(in, placements));
}

/// Over the ranks, of a block.
double sum_of_group_times(const MicroBatchPlan& plan) {
  double sum = 0;
  for (const RankTime& rank : predict_micro_batch(plan).ranks) sum += rank.block_s;
  return sum;
}

MicroBatchPlan at_home(const PlanInput& in, std::vector<Placement> placements) {
  bring_home(in, placements);
  return plan_of(in, placements);
}

TEST(Locality, KeepsTimeAndLimitAndMovesNoMore) {
  for (uint64_t seed = 0; seed < 400; ++seed) {
    Cases cases(seed);
    PlanInput in = cases.input(true, int64_t{1} << 26);  // long, so that a token here or there is nothing
    constexpr int32_t kNodes[] = {1, 2, 4, 8, 1 << 20};
    in.cluster.ranks_per_node = kNodes[seed % 5];
    if (seed % 3 == 1) in.rank_speed = cases.rank_speed(in.topology.num_ranks());
    const MicroBatchPlan any = cases.any_plan(in);
    const std::vector<Placement> placements(any.placements().begin(), any.placements().end());
    const MicroBatchPlan before = plan_of(in, placements);
    const MicroBatchPlan after = at_home(in, placements);
    after.validate();
    const double block_s = predict_micro_batch(before).blocks_s();
    EXPECT_NEAR(predict_micro_batch(after).blocks_s(), block_s, block_s * 1e-6) << "seed " << seed;
    EXPECT_NEAR(sum_of_group_times(after), sum_of_group_times(before), 1e-6 * sum_of_group_times(before))
        << "seed " << seed;
    // Cut evenly, which is what it goes by.
    const MicroBatchPlan evenly_before(in, "any", placements);
    const MicroBatchPlan evenly_after(in, "any", {after.placements().begin(), after.placements().end()});
    EXPECT_LE(evenly_after.tokens_moved(), evenly_before.tokens_moved() + std::ssize(before.chunks()))
        << "seed " << seed;
    in.max_tokens_per_rank = before.max_tokens();
    EXPECT_LE(at_home(in, placements).max_tokens(), in.max_tokens_per_rank) << "seed " << seed;
    EXPECT_EQ(at_home(in, placements), at_home(in, placements));
  }
}

TEST(Locality, AsManyEqualSequencesAsPossibleStayAtHome) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Cases cases(seed);
    const auto num_ranks = static_cast<int32_t>(cases.integer(2, 6));
    std::vector<std::vector<int64_t>> lens(static_cast<size_t>(num_ranks));
    for (auto& list : lens) list.assign(static_cast<size_t>(cases.integer(0, 4)), 512);
    const PlanInput in = lengths_in(lens, text("g1n", num_ranks), 3072);
    std::vector<int32_t> held(lens.size(), 0);
    std::vector<Placement> placements;
    for (int32_t s = 0; s < in.seq_lens.num_sequences(); ++s) {
      const auto rank = static_cast<int32_t>(cases.integer(0, num_ranks - 1));
      placements.push_back({.bag = BagId(rank), .first_rank = Rank(rank)});
      ++held[rank];
    }
    int64_t at_most_home = 0;  // a rank keeps as many as it has, or as it is to hold
    for (size_t r = 0; r < lens.size(); ++r) at_most_home += std::min<int64_t>(std::ssize(lens[r]), held[r]);
    const MicroBatchPlan plan = at_home(in, placements);
    EXPECT_EQ(plan.tokens_moved(), 512 * (in.seq_lens.num_sequences() - at_most_home)) << "seed " << seed;
  }
}

TEST(Locality, SequencesThatCannotStayAtHomeStayInTheirNode) {
  PlanInput in = lengths_in({{8}, {8}, {8}, {8}}, "g1n4", 3072);
  in.cluster.ranks_per_node = 2;
  std::vector<Placement> placements;
  for (const int32_t rank : {3, 3, 1, 1}) placements.push_back({.bag = BagId(rank), .first_rank = Rank(rank)});
  const MicroBatchPlan plan = at_home(in, placements);
  EXPECT_EQ(plan.placement(SequenceId(0)).first_rank, Rank(1));
  EXPECT_EQ(plan.placement(SequenceId(2)).first_rank, Rank(3));
}

TEST(Locality, NothingSwapsWhereNothingIsRouted) {
  PlanInput in = lengths_in({{100}, {100}}, "g1n2", 3072);
  const std::vector<Placement> placements = {{.bag = BagId(1), .first_rank = Rank(1)},
                                             {.bag = BagId(0), .first_rank = Rank(0)}};
  EXPECT_EQ(at_home(in, placements).tokens_moved(), 0);
  in.model.routed = false;
  EXPECT_EQ(at_home(in, placements).tokens_moved(), 200);
}

TEST(Locality, TakesManyEqualSequencesOfOneBag) {
  constexpr int32_t kRanks = 1 << 16;
  const PlanInput in = lengths_in({8, std::vector<int64_t>(kRanks, 8)}, "g8n1", 3072);
  const std::vector<Placement> all(kRanks * 8, at(0, 0, 8));
  EXPECT_EQ(at_home(in, all), plan_of(in, all));
}

}  // namespace
}  // namespace knapformer
