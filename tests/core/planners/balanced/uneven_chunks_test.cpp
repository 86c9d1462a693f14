#include "knapformer/core/planners/balanced/uneven_chunks.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "knapformer/core/plan/micro_batch_plan.h"
#include "tests/core/cases.h"

namespace knapformer {
namespace {

TEST(UnevenChunks, EvensOutThePerTokenPhase) {
  // 2 ranks: 100 tokens whole on rank 0, 300 shared: 100 + 100, 200.
  PlanInput in = lengths_in({{100, 300}, {}}, "g2/1n1", 8);
  const std::vector<Placement> placements = {at(0, 0, 1), at(0, 0, 2)};
  EXPECT_EQ(uneven_chunk_lens(in, placements), (std::vector<int64_t>{100, 100, 200}));
  // With rank 0 three times as fast, 300 of the 400 tokens are its.
  in.rank_speed = {3, 1};
  EXPECT_EQ(uneven_chunk_lens(in, placements), (std::vector<int64_t>{100, 200, 100}));
  // A limit binds first.
  in.max_tokens_per_rank = 250;
  EXPECT_EQ(uneven_chunk_lens(in, placements), (std::vector<int64_t>{100, 150, 150}));
}

TEST(UnevenChunks, SpeedsAreRelative) {
  for (uint64_t seed = 0; seed < 30; ++seed) {
    Cases cases(seed);
    PlanInput in = cases.input(true, 5000);
    const auto num_ranks = static_cast<size_t>(in.topology.num_ranks());
    const MicroBatchPlan any = cases.any_plan(in);
    const std::vector<Placement> placements(any.placements().begin(), any.placements().end());
    const std::vector<int64_t> even = uneven_chunk_lens(in, placements);
    for (const double speed : {1.0, 1e-12, 1e300}) {
      in.rank_speed.assign(num_ranks, speed);
      EXPECT_EQ(uneven_chunk_lens(in, placements), even) << "seed " << seed << ", speed " << speed;
    }
    const std::vector<double> speeds = cases.rank_speed(static_cast<int32_t>(num_ranks));
    in.rank_speed = speeds;
    const std::vector<int64_t> uneven = uneven_chunk_lens(in, placements);
    for (double& speed : in.rank_speed) speed *= 0x1p-40;
    EXPECT_EQ(uneven_chunk_lens(in, placements), uneven) << "seed " << seed;
  }
}

TEST(UnevenChunks, KeepsAnyLengthAndSpeed) {
  PlanInput in = lengths_in({4, std::vector<int64_t>(500, SequenceLengths::kMaxSequenceTokens)}, "g4/2/1n1", 8);
  in.rank_speed = {1, 1e-6, 1e-3, 1};
  std::vector<Placement> placements;
  for (int32_t s = 0; s < 2000; ++s) placements.push_back(at(0, s % 3 == 0 ? 2 : 0, s % 3 == 0 ? 2 : 4));
  // Nearly all goes to the fast ranks, as far as they may hold it.
  for (const int64_t percent : {100, 30}) {
    in.max_tokens_per_rank = (int64_t{2000} << 31) / 100 * percent;
    const MicroBatchPlan plan(in, "any", placements, uneven_chunk_lens(in, placements));
    plan.validate();
    EXPECT_LE(plan.max_tokens(), in.max_tokens_per_rank);
    EXPECT_GT(plan.tokens_after()[0],
              plan.num_tokens() / 100 * std::min<int64_t>(percent, 50) - plan.num_tokens() / 100);
    EXPECT_GT(plan.tokens_after()[3],
              plan.num_tokens() / 100 * std::min<int64_t>(percent, 50) - plan.num_tokens() / 100);
  }
}

TEST(UnevenChunks, ReachesHallsBound) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    Cases cases(seed);
    const PlanInput in = cases.input(true, 5000);
    const MicroBatchPlan any = cases.any_plan(in);
    std::vector<Placement> placements(any.placements().begin(), any.placements().end());
    const MicroBatchPlan plan(in, "any", placements, uneven_chunk_lens(in, placements));
    plan.validate();
    const std::vector<RankTime> ranks = predict_micro_batch(plan).ranks;
    // The longest per-token phase of each connected group against the fullest aligned block inside it.
    for (int32_t r = 0; r < plan.num_ranks(); ++r) {
      const Rank leader = ranks[r].group;
      if (leader != Rank(r)) continue;
      int64_t most = 0, bound = 0;
      const Bag& bag = in.topology.bag(in.topology.bag_of(leader));
      for (int32_t i = 0; i < plan.num_ranks(); ++i) {
        if (ranks[i].group == leader) most = std::max(most, plan.tokens_after()[i]);
      }
      for (const int32_t degree : in.topology.shapes()[bag.shape].degrees) {
        for (int32_t first = bag.first_rank.value; first < bag.first_rank.value + bag.num_ranks; first += degree) {
          bool inside = true;
          for (int32_t i = first; i < first + degree; ++i) inside = inside && ranks[i].group == leader;
          if (!inside) continue;
          int64_t tokens = 0;
          for (int32_t s = 0; s < plan.num_sequences(); ++s) {
            const Placement& place = plan.placement(SequenceId(s));
            if (place.first_rank.value >= first && place.first_rank.value + place.degree <= first + degree)
              tokens += in.seq_lens[SequenceId(s)];
          }
          bound = std::max(bound, (tokens + degree - 1) / degree);
        }
      }
      EXPECT_EQ(most, bound) << "seed " << seed << ", rank " << r;
    }
  }
}

}  // namespace
}  // namespace knapformer
