#include "knapformer/core/planners/planner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "knapformer/core/planners/greedy/greedy.h"
#include "knapformer/core/util/interrupt.h"
#include "tests/core/cases.h"
#include "tests/core/refusals.h"

namespace knapformer {
namespace {

/// The published planner, written straight from its description: no heaps, no queues, every bag looked at every time.
std::vector<int32_t> bags_by_the_book(const PlanInput& input) {
  const Topology& topology = input.topology;
  std::vector<int32_t> bag_of(static_cast<size_t>(input.seq_lens.num_sequences()));
  for (int32_t replica = 0; replica < topology.num_replicas(); ++replica) {
    const auto in_replica = [&](SequenceId s) {
      return input.seq_lens.home_of(s).value / topology.num_ranks_per_replica() == replica;
    };
    std::vector<std::pair<double, int32_t>> sequences;  // work, id
    double total = 0;
    for (int32_t s = 0; s < input.seq_lens.num_sequences(); ++s) {
      if (!in_replica(SequenceId(s))) continue;
      sequences.push_back({input.workload.work(input.seq_lens[SequenceId(s)], input.d_model) / 1e12, s});
      total += sequences.back().first;
    }
    std::stable_sort(sequences.begin(), sequences.end(),
                     [](const auto& a, const auto& b) { return a.first > b.first; });
    const double target = total / topology.num_ranks_per_replica();
    const int32_t first = replica * topology.num_bags_per_replica();
    const auto size_of = [&](int32_t b) { return topology.bag(BagId(b)).num_ranks; };
    std::vector<int32_t> bags(static_cast<size_t>(topology.num_bags_per_replica()));
    std::iota(bags.begin(), bags.end(), first);
    std::stable_sort(bags.begin(), bags.end(), [&](int32_t a, int32_t b) { return size_of(a) < size_of(b); });
    const int32_t largest = size_of(bags.back());
    std::vector<double> occupancy(topology.bags().size(), 0.0);
    for (const auto& [work, s] : sequences) {
      int32_t best = -1;
      for (const bool any_candidate : {true, false}) {
        for (const int32_t b : bags) {
          const int32_t size = size_of(b);
          const bool fits =
              any_candidate ? size * target >= work && input.seq_lens[SequenceId(s)] >= size : size == largest;
          if (fits && (best < 0 || occupancy[b] < occupancy[best])) best = b;
        }
        if (best >= 0) break;
      }
      occupancy[best] += work / (size_of(best) * target);
      bag_of[s] = best;
    }
  }
  return bag_of;
}

TEST(Greedy, DoesWhatThePaperSays) {
  for (uint64_t seed = 0; seed < 1000; ++seed) {
    Cases cases(seed);
    // Short lengths make many exact ties, long ones many bags without capacity.
    const PlanInput input = cases.input(false, seed % 2 == 0 ? 4 : 3000);
    const MicroBatchPlan plan = greedy(input);
    std::vector<int32_t> bags;
    for (const Placement& p : plan.placements()) bags.push_back(p.bag.value);
    ASSERT_EQ(bags, bags_by_the_book(input)) << "seed " << seed << ", topology " << input.topology.str();
    plan.validate();
    ASSERT_EQ(greedy(input), plan) << "not deterministic";
  }
}

TEST(Greedy, ReplicasArePlannedApart) {
  Cases cases(3);
  const SequenceLengths left = cases.lengths(4), right = cases.lengths(4);
  std::vector<std::vector<int64_t>> both;
  for (const SequenceLengths* lens : {&left, &right}) {
    for (int32_t r = 0; r < 4; ++r) both.emplace_back(lens->lens(Rank(r)).begin(), lens->lens(Rank(r)).end());
  }
  const auto plan_of = [](SequenceLengths lens, int64_t ranks) {
    return greedy(
        {.seq_lens = std::move(lens), .topology = Topology::parse("g1n2+g2n1", ranks), .d_model = 16, .workload = {}});
  };
  const MicroBatchPlan joined = plan_of(SequenceLengths::from_lists(both), 8), alone = plan_of(right, 4);
  for (int32_t s = 0; s < alone.num_sequences(); ++s) {
    const Placement& in_joined = joined.placement(SequenceId(left.num_sequences() + s));
    EXPECT_EQ(in_joined.bag.value, alone.placement(SequenceId(s)).bag.value + 3);
    EXPECT_EQ(in_joined.first_rank.value, alone.placement(SequenceId(s)).first_rank.value + 4);
  }
}

TEST(Greedy, PlansNothingAtAll) {
  const MicroBatchPlan plan = greedy(lengths_in({{}, {}}, "g2n1", 8));
  plan.validate();
  EXPECT_EQ(plan.num_sequences(), 0);
  EXPECT_DOUBLE_EQ(plan.balance_after().wir(), 1);
}

TEST(Greedy, RefusesNestedBags) { EXPECT_THROW(greedy(lengths_in({{4}, {}}, "g2/1n1", 8)), ArgumentError); }

TEST(MakePlan, GroupsOfSeveralNodesAreOfUseOrLeftOut) {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    Cases cases(seed);
    PlanInput in = cases.input(/*nested=*/true, 4000);
    in.d_model = 512;
    in.cluster.ranks_per_node = static_cast<int32_t>(cases.integer(1, 4));
    PlanInput inside = in;
    inside.topology = in.topology.within(in.cluster.ranks_per_node);
    const MicroBatchPlan wide = balanced(in);
    wide.validate();
    EXPECT_LE(step_s(wide), step_s(balanced(inside)) * (1 + 1e-12)) << "seed " << seed;
  }
}

TEST(MakePlan, KnowsItsSolversByName) {
  const PlanInput input = lengths_in({{4}, {9}}, "g2n1", 8);
  for (const Planner& planner : planners())
    EXPECT_NO_THROW(plan_micro_batch(input, planner.name).validate()) << planner.name;
  EXPECT_THROW(plan_micro_batch(input, "best"), ArgumentError);
}

TEST(MakePlan, ALimitThatARefusalNamesIsKept) {
  int32_t num_refused = 0;
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    Cases cases(seed);
    PlanInput in = cases.input(seed % 3 != 0, seed % 2 == 0 ? 60 : 3000);
    in.topology = Topology::parse(in.topology.str());
    if (in.topology.num_ranks() > 12) continue;
    in.seq_lens = cases.lengths(in.topology.num_ranks(), 60);
    const char* solver = in.topology.is_flat() && seed % 6 == 0 ? "greedy" : "balanced";
    const Effort effort{.moves = Effort::kLow};
    const int64_t total = std::accumulate(in.seq_lens.lens().begin(), in.seq_lens.lens().end(), int64_t{0});
    in.max_tokens_per_rank = std::max<int64_t>(1, total * cases.integer(5, 15) / 10 / in.topology.num_ranks());
    const std::string refusal = refusal_of([&] { plan_micro_batch(in, solver, effort); });
    if (refusal.empty()) continue;
    ++num_refused;
    in.max_tokens_per_rank = std::stoll(refusal.substr(refusal.find_first_of("0123456789", refusal.find("expected "))));
    EXPECT_NO_THROW(EXPECT_LE(plan_micro_batch(in, solver, effort).max_tokens(), in.max_tokens_per_rank))
        << "seed " << seed << ": " << refusal;
  }
  EXPECT_GT(num_refused, 200);
}

TEST(MakePlan, BagsOfManySizes) {
  std::string topology = "g1n1";
  int32_t num_ranks = 1;
  for (int32_t size = 2; size <= 150; ++size, num_ranks += size - 1) topology += text("+g", size, "n1");
  std::vector<std::vector<int64_t>> lists(static_cast<size_t>(num_ranks));
  for (size_t rank = 0; rank < lists.size(); rank += 8) lists[rank] = {1000 + static_cast<int64_t>(rank) * 17 % 4000};
  balanced(lengths_in(lists, topology, 64), {.moves = 20'000}).validate();
}

TEST(MakePlan, RefusesATopologyOfNoRanks) {
  PlanInput input;
  input.d_model = 8;
  EXPECT_THROW(plan_micro_batch(input, "balanced"), ArgumentError);
}

TEST(MakePlan, BoundsEffort) {
  Cases cases(1);
  const PlanInput in = cases.input(true);
  for (const int64_t moves : {Effort::kMaxMoves + 1, int64_t{1} << 31, Effort::kHigh - 1}) {
    EXPECT_EQ(refusal_of([&] { plan_micro_batch(in, "balanced", {.moves = moves}); }),
              "effort: got " + std::to_string(moves) +
                  ", expected 'low', 'default', 'high' or a number of moves from 0 to 100000000");
  }
  for (const char* name : {"low", "default", "high"}) EXPECT_EQ(Effort::parse(name).str(), name);
  EXPECT_EQ(Effort{.moves = 7}.str(), "7");
}

TEST(MakePlan, ALongSearchAsksWhetherItIsWanted) {
  struct Unwanted {};
  interrupt_check = [] { throw Unwanted(); };
  PlanInput in = lengths_in({{900, 40, 700}, {30, 55}, {600, 5}, {123}}, "g4/2/1n1", 64);
  EXPECT_THROW(plan_micro_batch(in, "balanced", {.moves = Effort::kMaxMoves}), Unwanted);
  EXPECT_NO_THROW(plan_micro_batch(in, "balanced", {.moves = Effort::kLow}));
  interrupt_check = nullptr;
}

}  // namespace
}  // namespace knapformer
