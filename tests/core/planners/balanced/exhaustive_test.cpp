// The balanced solver against every plan that there is, in cases small enough to go through them all.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <random>

#include "knapformer/core/planners/balanced/uneven_chunks.h"
#include "knapformer/core/planners/planner.h"
#include "knapformer/core/util/error.h"
#include "tests/core/cases.h"
#include "tests/core/mixes.h"

namespace knapformer {
namespace {

template <class Visit>
void for_all_placements(const PlanInput& in, const Visit& visit) {
  std::vector<Placement> choices;
  for (size_t b = 0; b < in.topology.bags().size(); ++b) {
    const Bag& bag = in.topology.bag(BagId(b));
    for (const int32_t degree : in.topology.shapes()[bag.shape].degrees) {
      for (int32_t i = 0; i < bag.num_ranks; i += degree) {
        choices.push_back({.bag = BagId(b), .first_rank = Rank(bag.first_rank.value + i), .degree = degree});
      }
    }
  }
  const auto n = static_cast<size_t>(in.seq_lens.num_sequences());
  std::vector<size_t> pick(n, 0);
  while (true) {
    std::vector<Placement> placements;
    for (const size_t p : pick) placements.push_back(choices[p]);
    visit(placements);
    size_t i = 0;
    while (i < n && ++pick[i] == choices.size()) pick[i++] = 0;
    if (i == n) return;
  }
}

/// The best predicted time of all placements, each cut as well as whole tokens allow.
double exhaustive_best(const PlanInput& in) {
  double best = std::numeric_limits<double>::infinity();
  for_all_placements(in, [&](const std::vector<Placement>& placements) {
    best = std::min(best, step_s(MicroBatchPlan(in, "any", placements, uneven_chunk_lens(in, placements))));
  });
  return best;
}

void check_close_to_the_best(bool with_given_work) {
  double worst = 1, sum = 0, bound_worst = 1;
  constexpr int kCases = 30;
  for (uint64_t seed = 0; seed < kCases; ++seed) {
    std::mt19937_64 random(seed);
    std::vector<std::vector<int64_t>> lens(4);
    for (int i = 0; i < 5; ++i) lens[random() % 4].push_back(int64_t{200} << (random() % 7));
    PlanInput in = lengths_in(lens, seed % 2 == 0 ? "g4/2/1n1" : "g2/1n2", 3072);
    if (with_given_work) {
      std::vector<double> work;
      for (int i = 0; i < 5; ++i) work.push_back(1e11 * static_cast<double>(1 << (random() % 7)));
      in.give_work(work);
    }
    const double best = exhaustive_best(in);
    const MicroBatchPlan plan = balanced(in, {.moves = 5000});
    const double ratio = step_s(plan) / best;
    EXPECT_GE(best, lower_bound_s({plan.input()}) * (1 - 1e-12));
    EXPECT_GE(ratio, 1 - 1e-4) << "seed " << seed;  // a different cut may win by a token
    worst = std::max(worst, ratio);
    bound_worst = std::max(bound_worst, best / lower_bound_s({plan.input()}));
    sum += ratio;
  }
  EXPECT_LE(sum / kCases, 1.01);
  EXPECT_LE(worst, 1.04);
  ::testing::Test::RecordProperty("worst_over_best", std::to_string(worst));
  ::testing::Test::RecordProperty("best_over_bound", std::to_string(bound_worst));
}

TEST(BalancedSolver, IsCloseToTheBestOfAllPlansOfSmallCases) { check_close_to_the_best(false); }
TEST(BalancedSolver, IsCloseToTheBestOfAllPlansOfGivenWork) { check_close_to_the_best(true); }

/// The least time of the slowest bag of all ways to put sequences into flat bags, where nothing is exchanged.
double best_of_flat(const PlanInput& in) {
  std::vector<double> bag_s(in.topology.bags().size());
  double best_s = std::numeric_limits<double>::infinity();
  const std::function<void(int32_t)> place = [&](int32_t s) {
    if (s == in.seq_lens.num_sequences()) best_s = std::ranges::max(bag_s);
    for (size_t b = 0; b < bag_s.size() && s < in.seq_lens.num_sequences(); ++b) {
      const double before_s = bag_s[b];
      const double flops = in.work(SequenceId(s)) / in.topology.bag(BagId(b)).num_ranks;
      bag_s[b] += in.model.num_blocks * flops / in.cluster.flops_per_s;
      if (bag_s[b] < best_s) place(s + 1);
      bag_s[b] = before_s;
    }
  };
  place(0);
  return best_s;
}

TEST(BalancedSolver, FewSequencesInFlatBagsArePlannedBestOfAll) {
  const char* topologies[] = {"g1n3", "g1n2", "g1n4", "g1n5", "g2n2", "g1n1+g2n2", "g1n2+g3n1"};
  for (uint64_t seed = 0; seed < 105; ++seed) {
    Cases cases(seed);
    const char* const topology = topologies[seed % 7];
    std::vector<std::vector<int64_t>> lens(static_cast<size_t>(Topology::parse(topology).num_ranks()));
    const int64_t count = seed % 3 == 0 && topology[1] == '1' ? 3 * std::ssize(lens) : cases.integer(4, 12);
    for (int64_t i = 0; i < std::min(count, int64_t{12}); ++i)
      lens[i % lens.size()].push_back(6 * (seed % 2 == 0 ? cases.integer(300, 1400) : 1 << cases.integer(4, 11)));
    PlanInput in = lengths_in(lens, topology, 3072);
    if (seed == 0) in = lengths_in({{3480, 3794, 8217}, {7619, 3478, 7168}, {7885, 2342, 5863}}, "g1n3", 3072);
    use_block_clock(in);
    in.cluster.node_bytes_per_s = std::numeric_limits<double>::infinity();
    in.model.routed = false;
    const double best_s = best_of_flat(in);
    for (const int64_t moves : {Effort::kLow, int64_t{100}, Effort::kDefault})
      EXPECT_NEAR(step_s(balanced(in, {.moves = moves})) / best_s, 1, 1e-4) << topology << ", seed " << seed;
  }
}

/// The lowest limit of tokens per rank that some placement keeps.
int64_t least_limit(const PlanInput& in) {
  int64_t least = std::numeric_limits<int64_t>::max();
  for_all_placements(in, [&](const std::vector<Placement>& placements) {
    least = std::min(least, MicroBatchPlan(in, "any", placements, uneven_chunk_lens(in, placements)).max_tokens());
  });
  return least;
}

TEST(BalancedSolver, FindsAPlanWithinALimitThatSomePlanKeeps) {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    std::mt19937_64 random(seed);
    std::vector<std::vector<int64_t>> lens(4);
    for (int i = 0; i < 6; ++i) lens[random() % 4].push_back(static_cast<int64_t>(100 + random() % 3000));
    const char* topologies[] = {"g4/2/1n1", "g2/1n2", "g2n2", "g1n2+g2n1", "g1n4"};
    PlanInput in = lengths_in(lens, topologies[seed % 5], 512);
    in.max_tokens_per_rank = least_limit(in);
    for (const int64_t effort : {Effort::kLow, Effort::kDefault}) {
      EXPECT_NO_THROW(balanced(in, {.moves = effort}).validate()) << "seed " << seed << ", effort " << effort;
    }
    --in.max_tokens_per_rank;
    EXPECT_THROW(balanced(in), ArgumentError) << "seed " << seed;
  }
}

}  // namespace
}  // namespace knapformer
