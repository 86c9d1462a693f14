#include "knapformer/core/planners/balanced/locality.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "knapformer/core/planners/balanced/uneven_chunks.h"
#include "knapformer/core/planners/planner.h"
#include "knapformer/core/util/error.h"
#include "tests/core/cases.h"
#include "tests/core/mixes.h"

namespace knapformer {
namespace {

PlanInput input_of(const std::vector<std::vector<int64_t>>& lens, const std::string& topology) {
  return {.seq_lens = SequenceLengths::from_lists(lens),
          .topology = Topology::parse(topology, std::ssize(lens)),
          .d_model = 3072,
          .workload = {}};
}

/// Cuts as the solver does.
Plan plan_of(const PlanInput& in, const std::vector<Placement>& placements) {
  return Plan(in, "any", placements, uneven_chunk_lens(in, placements));
}

/// Over the ranks, of a forward pass of a block.
double sum_of_group_times(const Plan& plan) {
  double sum = 0;
  for (const RankTime& rank : predict_step(plan).ranks) {
    const PassTime& t = rank.forward;
    sum += t.token_s + t.wait_before_s + t.attention_s() + t.exchange_s() + t.wait_after_s;
  }
  return sum;
}

Plan at_home(const PlanInput& in, std::vector<Placement> placements) {
  improve_locality(in, placements);
  return plan_of(in, placements);
}

TEST(Locality, KeepsTimeAndLimitAndMovesNoMore) {
  for (uint64_t seed = 0; seed < 400; ++seed) {
    Cases cases(seed);
    PlanInput in = cases.input(true, int64_t{1} << 26);  // long, so that a token here or there is nothing
    constexpr int32_t kNodes[] = {1, 2, 4, 8, 1 << 20};
    in.cluster.ranks_per_node = kNodes[seed % 5];
    if (seed % 3 == 1) in.rank_speed = cases.rank_speed(in.topology.num_ranks());
    const Plan any = cases.any_plan(in);
    const std::vector<Placement> placements(any.placements().begin(), any.placements().end());
    const Plan before = plan_of(in, placements);
    const Plan after = at_home(in, placements);
    after.validate();
    const double block_s = predict_step(before).blocks_s();
    EXPECT_NEAR(predict_step(after).blocks_s(), block_s, block_s * 1e-6) << "seed " << seed;
    EXPECT_NEAR(sum_of_group_times(after), sum_of_group_times(before), 1e-6 * sum_of_group_times(before))
        << "seed " << seed;
    // Cut evenly, which is what it goes by.
    const Plan evenly_before(in, "any", placements);
    const Plan evenly_after(in, "any", {after.placements().begin(), after.placements().end()});
    EXPECT_LE(evenly_after.tokens_moved(), evenly_before.tokens_moved() + std::ssize(before.chunks()))
        << "seed " << seed;
    in.max_tokens_per_rank = before.max_tokens();
    EXPECT_LE(at_home(in, placements).max_tokens(), in.max_tokens_per_rank) << "seed " << seed;
    EXPECT_EQ(at_home(in, placements), at_home(in, placements));
  }
}

TEST(Locality, RoutesInLittleMoreTimeThanTheBestOfAllPermutationsOfBags) {
  double sum = 0, sum_before = 0, sum_of_best = 0;  // of routes, in seconds
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Cases cases(seed);
    const auto num_bags = static_cast<int32_t>(cases.integer(2, 6)), size = static_cast<int32_t>(cases.integer(1, 2));
    std::vector<std::vector<int64_t>> lens(static_cast<size_t>(num_bags * size));
    for (auto& list : lens) {
      for (int64_t i = cases.integer(0, 3); i > 0; --i) list.push_back(cases.integer(1, 1000) * 2);
    }
    PlanInput in = input_of(lens, text("g", size, "n", num_bags));
    in.cluster.node_latency_s = 0;
    if (in.seq_lens.num_sequences() == 0) continue;
    std::vector<Placement> placements;
    for (int32_t s = 0; s < in.seq_lens.num_sequences(); ++s) {
      const auto bag = static_cast<int32_t>(cases.integer(0, num_bags - 1));
      placements.push_back({.bag = BagId(bag), .first_rank = Rank(bag * size), .degree = size});
    }
    const auto route_s = [&](const std::vector<Placement>& p) { return predict_step(Plan(in, "any", p)).route_s; };
    std::vector<int32_t> places(static_cast<size_t>(num_bags));
    std::iota(places.begin(), places.end(), 0);
    double best_s = std::numeric_limits<double>::infinity();
    do {
      std::vector<Placement> permuted = placements;
      for (Placement& place : permuted) {
        place.bag = BagId(places[place.bag.index()]);
        place.first_rank = Rank(place.bag.value * size);
      }
      best_s = std::min(best_s, route_s(permuted));
    } while (std::next_permutation(places.begin(), places.end()));
    const double before_s = route_s(placements);
    improve_locality(in, placements);
    EXPECT_LE(route_s(placements), before_s) << "seed " << seed;
    sum += route_s(placements);
    sum_before += before_s;
    sum_of_best += best_s;
  }
  EXPECT_LE(sum - sum_of_best, 0.1 * (sum_before - sum_of_best)) << sum << " " << sum_before << " " << sum_of_best;
}

TEST(Locality, RanksOnTheirOwnSwapBeyondTheirGroup) {
  // Whole groups of 2 cannot bring all home, single ranks can.
  EXPECT_EQ(balanced(input_of({{1000}, {1001}, {1000}, {1002}}, "g4/2/1n1")).tokens_moved(), 0);
  // Nor can whole bags, of two shapes.
  const PlanInput in = input_of({{100}, {200}, {300}, {400}, {500}, {600}}, "g2/1n1+g4/2/1n1");
  std::vector<Placement> placements;
  for (const int32_t rank : {5, 3, 1, 4, 2, 0})
    placements.push_back({.bag = BagId(rank < 2 ? 0 : 1), .first_rank = Rank(rank), .degree = 1});
  EXPECT_EQ(at_home(in, placements).tokens_moved(), 0);
  // A shared pair goes to another bag, and those on their own there come home.
  const PlanInput pairs = input_of({{100}, {200}, {}, {}, {1000}, {}, {}, {}}, "g4/2/1n2");
  EXPECT_EQ(at_home(pairs, {{.bag = BagId(1), .first_rank = Rank(6), .degree = 1},
                            {.bag = BagId(1), .first_rank = Rank(7), .degree = 1},
                            {.bag = BagId(0), .first_rank = Rank(0), .degree = 2}})
                .tokens_moved(),
            500);
}

TEST(Locality, EqualSpeedsAreAsGoodAsNone) {
  PlanInput in = input_of(std::vector<std::vector<int64_t>>(8, std::vector<int64_t>(4, 512)), "g8/4/2/1n1");
  in.rank_speed.assign(8, 1.0);
  EXPECT_EQ(balanced(in).tokens_moved(), 0);
  in = mix_input("joint", "g8/4/2/1n4", 0, 1.0);
  const Plan none = balanced(in);
  in.rank_speed.assign(32, 1.0);
  EXPECT_EQ(balanced(in).tokens_moved(), none.tokens_moved());
}

TEST(Locality, OnlyRanksOfEqualSpeedSwap) {
  PlanInput in = input_of({{100}, {200}, {300}, {400}}, "g1n4");
  in.rank_speed = {2, 1, 1, 2};
  std::vector<Placement> placements;
  for (const int32_t rank : {3, 2, 1, 0}) placements.push_back({.bag = BagId(rank), .first_rank = Rank(rank)});
  EXPECT_EQ(at_home(in, placements).tokens_moved(), 0);
  in.rank_speed = {2, 2, 1, 1};
  EXPECT_EQ(at_home(in, placements), plan_of(in, placements));
  // Equal sequences swap whatever the ranks are.
  in.seq_lens = SequenceLengths::from_lists({{100}, {100}, {100}, {100}});
  EXPECT_EQ(at_home(in, placements).tokens_moved(), 0);
}

TEST(Locality, NothingSwapsWhereNothingIsRouted) {
  PlanInput in = input_of({{100}, {100}}, "g1n2");
  const std::vector<Placement> placements = {{.bag = BagId(1), .first_rank = Rank(1)},
                                             {.bag = BagId(0), .first_rank = Rank(0)}};
  EXPECT_EQ(at_home(in, placements).tokens_moved(), 0);
  in.model.routed = false;
  EXPECT_EQ(at_home(in, placements).tokens_moved(), 200);
}

TEST(Locality, TakesALargeBagOrManyEqualSequences) {
  constexpr int32_t kRanks = 1 << 16;
  std::vector<std::vector<int64_t>> lens(kRanks);
  lens[5] = {1000, 3000};
  PlanInput in = input_of(lens, "g65536/1n1");
  in.cluster.ranks_per_node = kRanks;
  EXPECT_EQ(
      at_home(in, {{.bag = BagId(0), .first_rank = Rank(7)}, {.bag = BagId(0), .first_rank = Rank(9)}}).tokens_moved(),
      1000);
  lens.assign(8, std::vector<int64_t>(kRanks, 8));
  in = input_of(lens, "g8n1");
  const std::vector<Placement> all(kRanks * 8, {.bag = BagId(0), .first_rank = Rank(0), .degree = 8});
  EXPECT_EQ(at_home(in, all), plan_of(in, all));
}

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
