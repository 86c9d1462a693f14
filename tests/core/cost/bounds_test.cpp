#include "knapformer/core/cost/bounds.h"

#include <gtest/gtest.h>

#include "knapformer/core/cost/step_time.h"
#include "knapformer/core/planners/planner.h"
#include "knapformer/core/planners/whole_step/step_solver.h"
#include "tests/core/cases.h"

namespace knapformer {
namespace {

TEST(LowerBound, NoPlanBeatsIt) {
  for (uint64_t seed = 0; seed < 800; ++seed) {
    Cases cases(seed);
    PlanInput in = cases.input(true, 3000);
    in.cluster.ranks_per_node = static_cast<int32_t>(cases.integer(1, 8));
    in.cluster.overlaps_attention = seed % 2 == 0;
    in.cluster.fixed_s = 0;  // or little else would count
    in.model.mode = static_cast<StepMode>(seed % 3);
    in.model.num_heads = seed % 5 == 0 ? static_cast<int32_t>(cases.integer(1, 12)) : 0;
    if (seed % 7 == 0) in.cluster.node_bytes_per_s = in.cluster.network_bytes_per_s;
    if (seed % 4 == 1) cases.cut_attention(in);
    const double bound = lower_bound_s({in});
    for (int i = 0; i < 5; ++i) EXPECT_GE(step_s(cases.any_plan(in)), bound * (1 - 1e-12)) << "seed " << seed;
  }
}

TEST(LowerBound, NoStepBeatsIt) {
  Cases cases(2);
  for (int i = 0; i < 200; ++i) {
    StepInput input{.sequences = cases.input(i % 2 == 0, 2000),
                    .num_micro_batches = static_cast<int32_t>(cases.integer(1, 4)),
                    .sync = i % 3 == 0 ? StepSync::kStep : StepSync::kMicroBatch};
    if (i % 5 == 0) input.sequences.rank_speed = cases.rank_speed(input.sequences.topology.num_ranks());
    if (i % 4 == 0) input.sequences.model.num_parameters = 1e7;
    const double bound_s = lower_bound_s(input);
    for (int j = 0; j < 5; ++j) {
      const Plan plan = cases.any_step(input);
      EXPECT_LE(bound_s, predict_step(plan).total_s * (1 + 1e-9));
    }
  }
}

TEST(LowerBound, ASequenceThatExceedsAMicroBatchLeavesTheOthersToWhatFsdpGathers) {
  // Whole sequences alone: the long one takes a micro-batch, and nothing in the others hides what FSDP gathers.
  StepInput input{.sequences = lengths_in({{60'000}, {100}}, "g1n2", 1024), .num_micro_batches = 3};
  input.sequences.model.routed = false;
  const PlanInput& step = input.sequences;
  const double long_s = BlockRates(step).work_s(step, SequenceId(0));
  const double expected_s = replica_step_s(step, long_s) + 2 * replica_step_s(step, 0) + 3 * step.cluster.fixed_s;
  EXPECT_DOUBLE_EQ(lower_bound_s(input), expected_s);
  EXPECT_DOUBLE_EQ(predict_step(plan_step(input, "balanced")).total_s, expected_s);
}

}  // namespace
}  // namespace knapformer
