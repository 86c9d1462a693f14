#include "knapformer/core/cost/accumulation.h"

#include <algorithm>
#include <numeric>

#include "knapformer/core/cost/bounds.h"

namespace knapformer {

AccumulatedTime predict_accumulated(const StepPlan& plan) {
  AccumulatedTime out;
  const bool waits_once = plan.input().sync == StepSync::kStep;
  std::vector<double> rank_s(plan.input().sequences.seq_lens.num_ranks(), 0.0);  // when each rank is done
  double fsdp_s = 0;                                                             // after the last micro-batch
  for (const Plan& micro_batch : plan.plans()) {
    const StepTime time = predict_step(micro_batch);
    out.ideal_s += time.ideal_s + time.fixed_s;
    out.micro_batch_s.push_back(time.total_s());
    if (!waits_once) {
      out.total_s += time.total_s();
      continue;
    }
    const TrainedModel& model = micro_batch.input().model;
    std::vector<double> start_s(rank_s.size(), 0.0);  // of a group, at its first rank
    for (size_t r = 0; r < rank_s.size(); ++r) {
      double& latest_s = start_s[time.ranks[r].group.index()];
      latest_s = std::max(latest_s, rank_s[r]);
    }
    for (size_t r = 0; r < rank_s.size(); ++r)
      rank_s[r] = start_s[time.ranks[r].group.index()] + model.num_blocks * time.ranks[r].block_s(model.passes());
    out.total_s += time.route_s + time.fixed_s;
    fsdp_s = time.fsdp_s;
  }
  if (waits_once) out.total_s += fsdp_s + std::ranges::max(rank_s);
  return out;
}

double accumulated_s(const StepInput& input, std::span<const double> block_s) {
  if (input.sync == StepSync::kStep)
    return replica_step_s(input.sequences, std::accumulate(block_s.begin(), block_s.end(), 0.0), 0);
  double sum_s = 0;
  for (const double seconds : block_s) sum_s += replica_step_s(input.sequences, seconds, 0);
  return sum_s;
}

double blocks_lower_bound_s(const StepInput& input) {
  const PlanInput& step = input.sequences;
  double block_s = 0;
  for (int32_t replica = 0; replica < step.topology.num_replicas(); ++replica)
    block_s = std::max(block_s, replica_lower_bound_s(step, step.topology, replica));
  return block_s;
}

double lower_bound_s(const StepInput& input, double blocks_s) {
  const std::vector<double> even(static_cast<size_t>(input.num_micro_batches), blocks_s / input.num_micro_batches);
  return accumulated_s(input, even) + input.num_micro_batches * input.sequences.cluster.fixed_s;
}

double lower_bound_s(const StepInput& input) { return lower_bound_s(input, blocks_lower_bound_s(input)); }

PlanPrediction prediction_of(const StepPlan& plan) {
  return {.predicted_time_s = predict_accumulated(plan).total_s, .lower_bound_s = lower_bound_s(plan.input())};
}

}  // namespace knapformer
