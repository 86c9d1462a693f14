#include "knapformer/core/model/topology.h"

#include <gtest/gtest.h>

#include "tests/core/refusals.h"

namespace knapformer {
namespace {

TEST(Topology, NumbersRanksConsecutivelySmallBagsFirst) {
  const Topology topology = Topology::parse("g4n1+g1n2+g2n1");
  ASSERT_EQ(topology.num_ranks(), 8);
  EXPECT_EQ(topology.str(), "g1n2+g2n1+g4n1");
  const std::vector<std::pair<int, int>> expected = {{0, 1}, {1, 1}, {2, 2}, {4, 4}};  // first rank, ranks
  ASSERT_EQ(topology.bags().size(), expected.size());
  for (size_t b = 0; b < expected.size(); ++b) {
    EXPECT_EQ(topology.bags()[b].first_rank.value, expected[b].first);
    EXPECT_EQ(topology.bags()[b].num_ranks, expected[b].second);
    for (int i = 0; i < expected[b].second; ++i) EXPECT_EQ(topology.bag_of(Rank(expected[b].first + i)), BagId(b));
  }
}

TEST(Topology, RepeatsOverTheGroup) {
  const Topology topology = Topology::parse("g1n2+g2n1", 12);
  EXPECT_EQ(topology.num_ranks(), 12);
  EXPECT_EQ(topology.num_replicas(), 3);
  EXPECT_EQ(topology.num_bags_per_replica(), 3);
  EXPECT_EQ(topology.bag(BagId(7)).first_rank, Rank(9));
  EXPECT_EQ(topology.bag(BagId(8)).first_rank, Rank(10));
  EXPECT_EQ(topology.str(), "g1n2+g2n1");
}

TEST(Topology, JoinsTermsOfOneShapeAndKeepsTextAsAFixedPoint) {
  for (const char* text : {"g1n1", "g8n4", "g1n2+g2n1+g4n1", "g8/4/2/1n4", "g2n1+g4n1+g4/2n2", "g6/3n1"}) {
    EXPECT_EQ(Topology::parse(text).str(), text);
    EXPECT_EQ(Topology::parse(Topology::parse(text).str()), Topology::parse(text));
  }
  EXPECT_EQ(Topology::parse("g2n1 + g2n3").str(), "g2n4");
}

TEST(Topology, NestedBagsHaveAscendingDegrees) {
  const Topology topology = Topology::parse("g8/4/2/1n4");
  EXPECT_FALSE(topology.is_flat());
  EXPECT_EQ(topology.shapes()[0].degrees, (std::vector<int32_t>{1, 2, 4, 8}));
  EXPECT_TRUE(Topology::parse("g8n4").is_flat());
  EXPECT_EQ(Topology::nested(8, 4), topology);
  EXPECT_EQ(Topology::nested(12, 1).str(), "g12/6/3/1n1");
  EXPECT_EQ(Topology::nested(1, 3).str(), "g1n3");
}

TEST(Topology, WithinHasTheSameRanksInSmallerBags) {
  const auto within = [](std::string_view text, int64_t num_ranks) {
    const Topology topology = Topology::parse(text, num_ranks).within(8);
    EXPECT_EQ(topology.num_ranks(), num_ranks);
    return topology.str();
  };
  EXPECT_EQ(within("g32/16/8/4/2/1n1", 64), "g8/4/2/1n4");
  EXPECT_EQ(within("g8/4/2/1n1", 32), "g8/4/2/1n1");
  EXPECT_EQ(within("g16/2n1", 16), "g2n8");
  EXPECT_EQ(within("g16n1", 16), "g16n1");
  EXPECT_EQ(within("g1n1+g12/6/1n1", 13), "g1n1+g6/1n2");
}

class MalformedTopology : public testing::TestWithParam<const char*> {};

TEST_P(MalformedTopology, IsRefusedByName) {
  const std::string refusal = refusal_of([] { Topology::parse(GetParam()); });
  EXPECT_TRUE(refusal.starts_with("topology: got '")) << refusal;
}

INSTANTIATE_TEST_SUITE_P(All, MalformedTopology,
                         testing::Values("", "g", "g2", "g2n", "n2g2", "g0n1", "g1n0", "g-1n1", "g2n1+", "+g2n1",
                                         "g2n1,g2n1", "g2n1x", "g2.5n1", "g99999999999n1", "g1048576n2", "g8/3n1",
                                         "g8/8n1", "g4/8n1", "g8//4n1", "g8/n1", "g12/6/4n1", "G2n1"));

TEST(Topology, CountsRanksBeyondWhatAnIntegerHolds) {
  std::string terms = "g1n1048576";
  for (int32_t i = 1; i < 4096; ++i) terms += "+g1n1048576";  // 2^32 ranks in all
  EXPECT_THROW(Topology::parse(terms), ArgumentError);
  EXPECT_THROW(Topology::parse("g1n8+" + terms), ArgumentError);
}

TEST(Topology, RefusesRanksItDoesNotDivide) {
  for (const int64_t ranks : {0, -8, 7, 9, 1}) EXPECT_THROW(Topology::parse("g8n1", ranks), ArgumentError) << ranks;
  EXPECT_EQ(refusal_of([] { Topology::parse("g2n2", 6); }),
            "topology: got 'g2n2', which is 4 ranks, for 6 ranks, expected a topology whose ranks divide the ranks of "
            "the group");
}

}  // namespace
}  // namespace knapformer
