#include "knapformer/core/planners/balanced/placement_tree.h"

#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "knapformer/core/cost/step_time.h"
#include "knapformer/core/planners/balanced/uneven_chunks.h"
#include "tests/core/cases.h"

namespace knapformer {
namespace {

TEST(PlacementTrees, AGroupTakesNoLongerThanTheClockSays) {
  double clock_sum = 0, predicted_sum = 0;
  for (uint64_t seed = 0; seed < 400; ++seed) {
    Cases cases(seed);
    PlanInput in = cases.input(true, int64_t{1} << 26);  // long, so that a token here or there is nothing
    in.cluster.overlaps_attention = seed % 4 != 0;
    in.d_model = int64_t{1} << 22;  // and a link so slow that all phases are of one order
    in.cluster.node_bytes_per_s = in.cluster.network_bytes_per_s = seed % 2 == 0 ? 25e6 : 200e6;
    in.model.mode = seed % 5 == 0 ? StepMode::kInference : StepMode::kTraining;
    const MicroBatchPlan any = cases.any_plan(in);
    const std::vector<Placement> placements(any.placements().begin(), any.placements().end());
    const MicroBatchPlan plan(in, "any", placements, uneven_chunk_lens(in, placements));
    const MicroBatchTime time = predict_micro_batch(plan);
    for (int32_t replica = 0; replica < in.topology.num_replicas(); ++replica) {
      PlacementTrees trees(in, replica);
      for (const TreeItem& item : trees.items()) trees.add(item, trees.node_of(placements[item.id.index()]));
      trees.update_all();
      const double clock_s = trees.slowest() * trees.unit_s(), predicted_s = time.replica_block_s[replica];
      EXPECT_GE(clock_s, predicted_s * (1 - 1e-5)) << "seed " << seed;
      clock_sum += clock_s;
      predicted_sum += predicted_s;
    }
  }
  EXPECT_LE(clock_sum, predicted_sum * 1.025);
}

TEST(PlacementTrees, NoChangeHasLessThanTheLeastEnergy) {
  int num_changes = 0, num_near = 0;
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Cases cases(seed);
    PlacementTrees trees(cases.input(true), 0, 2);
    trees.set_levels(std::array{trees.unit_s(), 1.5 * trees.unit_s()});
    const auto any_node = [&] {  // mostly a rank
      auto v = static_cast<int32_t>(cases.integer(0, trees.num_nodes() - 1));
      while (trees.node(v).num_children > 0 && cases.integer(0, 9) > 0) v = trees.node(v).first_child;
      return v;
    };
    std::vector<int32_t> nodes(trees.items().size());
    std::ranges::generate(nodes, any_node);
    trees.put(nodes);
    trees.set_reference(trees.slowest() * static_cast<double>(seed % 4) / 4, trees.slowest());
    for (size_t i = 0; i < nodes.size(); ++i) {
      const size_t j = static_cast<size_t>(cases.integer(0, std::ssize(nodes) - 1));  // with which it changes places
      const bool is_swap = j > i && seed % 2 == 0;                                    // items come by descending work
      const int32_t from = nodes[i], to = is_swap ? nodes[j] : any_node();
      if (to == from) continue;
      TreeItem more = trees.items()[i];
      if (is_swap) {
        more.tokens -= trees.items()[j].tokens;
        more.attention -= trees.items()[j].attention;
        nodes[j] = from;
      }
      const double least = trees.least_energy(more, to, from);
      nodes[i] = to;
      trees.put(nodes);
      const double energy = trees.state(trees.root(trees.node(to).bag)).energy;
      EXPECT_LE(least, energy * (1 + 1e-9)) << "seed " << seed;
      ++num_changes;
      num_near += least >= energy / 2;
    }
  }
  EXPECT_GE(num_near, num_changes / 2);
}

TEST(PlacementTrees, WholeSequencesOfDeepBagsExchangeNothing) {
  for (const std::string degrees : {"8/4/2/1", "32/16/8/4/2/1", "512/256/128/64/32/16/8/4/2/1"}) {
    std::vector<std::vector<int64_t>> lens;
    std::vector<Placement> placements;
    for (int32_t rank = 0; rank < std::stoi(degrees); ++rank) {
      lens.emplace_back(2 - rank % 2, 20'000);  // of each pair of ranks one is shared
      placements.push_back(at(0, rank, 1));
      if (rank % 2 == 0) placements.push_back(at(0, rank, 2));
    }
    const PlanInput in = lengths_in(lens, "g" + degrees + "n1", 3072);
    PlacementTrees trees(in, 0);
    for (const TreeItem& item : trees.items()) trees.add(item, trees.node_of(placements[item.id.index()]));
    trees.update_all();
    const MicroBatchPlan plan(in, "any", placements, uneven_chunk_lens(in, placements));
    EXPECT_NEAR(trees.slowest() * trees.unit_s() / max_block_s(plan), 1, 0.002) << degrees;
  }
}

}  // namespace
}  // namespace knapformer
