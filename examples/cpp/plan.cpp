// The planner alone, without Torch: lengths in, a plan out.
#include <cstdio>

#include "knapformer/core/cost/step_time.h"
#include "knapformer/core/planners/planner.h"

int main() {
  // Eight ranks in two bags of four; a sequence is shared by 4, 2 or 1 of a bag's ranks.
  knapformer::PlanInput input;
  input.topology = knapformer::Topology::parse("g4/2/1n2", 8);
  input.seq_lens = knapformer::SequenceLengths::from_lists(
      {{25'000}, {256, 400, 300}, {1'024}, {4'096, 256}, {256}, {9'000}, {700, 700}, {300}});  // tokens, by rank
  input.d_model = 3072;
  try {
    const knapformer::MicroBatchPlan plan = knapformer::plan_micro_batch(input, "balanced");
    for (int32_t s = 0; s < plan.num_sequences(); ++s) {
      const knapformer::Placement& place = plan.placement(knapformer::SequenceId(s));
      std::printf("sequence %2d: %5lld tokens on %d ranks from rank %d\n", s,
                  static_cast<long long>(plan.seq_lens()[knapformer::SequenceId(s)]), place.degree,
                  place.first_rank.value);
    }
    std::printf("work, highest over mean: %.3f before, %.3f after; predicted step: %.3f s\n",
                plan.balance_before().max_over_mean(), plan.balance_after().max_over_mean(),
                knapformer::predict_micro_batch(plan).total_s());
  } catch (const knapformer::ArgumentError& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
