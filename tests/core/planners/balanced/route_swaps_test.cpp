#include "knapformer/core/planners/balanced/route_swaps.h"

#include <gtest/gtest.h>

#include <vector>

#include "knapformer/core/planners/balanced/locality.h"

namespace knapformer {
namespace {

/// Ranks 0 and 1 hold each other's long sequence, and their own short one. Rank 2 takes longest.
PlanInput crossed() {
  return {.seq_lens = SequenceLengths::from_lists({{1000, 300}, {1001, 310}, {1310}}),
          .topology = Topology::parse("g1n3", 3),
          .d_model = 3072,
          .workload = {}};
}

Plan routed(const PlanInput& in) {
  std::vector<Placement> placements;
  for (const int32_t rank : {1, 0, 0, 1, 2}) placements.push_back({.bag = BagId(rank), .first_rank = Rank(rank)});
  improve_locality(in, placements);
  return Plan(in, "any", placements);
}

TEST(RouteSwaps, SequencesOfAboutEqualLengthComeHome) { EXPECT_EQ(routed(crossed()).tokens_moved(), 0); }

TEST(RouteSwaps, ALimitOfTokensIsKept) {
  PlanInput in = crossed();
  in.max_tokens_per_rank = 1311;  // what rank 1 holds when all are at home
  EXPECT_EQ(routed(in).tokens_moved(), 0);
  in.max_tokens_per_rank = 1310;
  EXPECT_EQ(routed(in).max_tokens(), 1310);
  EXPECT_EQ(routed(in).tokens_moved(), 610);  // both contents swap
}

TEST(RouteSwaps, TheSlowestRankTakesNoLonger) {
  PlanInput in = crossed();
  in.seq_lens = SequenceLengths::from_lists({{1000, 300}, {1001, 310}, {1000}});  // now rank 1 would take longest
  EXPECT_EQ(routed(in).tokens_moved(), 610);
  in.seq_lens = crossed().seq_lens;
  in.rank_speed = {1, 2, 1};  // unlike ranks keep what they hold
  EXPECT_EQ(routed(in).tokens_moved(), 2001);
}

TEST(RouteSwaps, WhatIsSharedGoesWithItsBlock) {
  // Pairs 0 and 1 swap the sequence that they share and what lies below it. The first fills rank 3 less than rank 2.
  PlanInput in{.seq_lens = SequenceLengths::from_lists({{4000, 100}, {}, {4200, 120}, {}}),
               .topology = Topology::parse("g4/2/1n1", 4),
               .d_model = 3072,
               .workload = {}};
  const auto at = [](int32_t rank, int32_t degree) {
    return Placement{.bag = BagId(0), .first_rank = Rank(rank), .degree = degree};
  };
  std::vector<Placement> placements{at(2, 2), at(2, 1), at(0, 2), at(1, 1)};
  improve_locality(in, placements);
  EXPECT_EQ(placements, (std::vector<Placement>{at(0, 2), at(0, 1), at(2, 2), at(2, 1)}));
}

}  // namespace
}  // namespace knapformer
