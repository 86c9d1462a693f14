#include "knapformer/torch/planning.h"

#include <ATen/record_function.h>

#include <chrono>
#include <utility>

#include "knapformer/core/planners/planner.h"
#include "knapformer/core/planners/whole_step/micro_batches.h"

namespace knapformer {

GatheredLengths own_lengths(std::span<const int64_t> seq_lens, int64_t d_model, std::span<const Mask> masks,
                            std::span<const double> work, Rank rank) {
  const auto count = static_cast<int64_t>(seq_lens.size());
  GatheredLengths own{.lengths = SequenceLengths({seq_lens.begin(), seq_lens.end()}, std::span(&count, 1), rank.value)};
  if (d_model < 1) throw_argument("d_model", d_model, "at least 1");
  if (!masks.empty() && masks.size() != seq_lens.size()) {
    throw_argument("masks", text(masks.size(), " masks"), text("one for each of the ", count, " sequences, or none"));
  }
  for (size_t s = 0; s < masks.size(); ++s) own.attention_pairs.push_back(masks[s].pairs(seq_lens[s]));
  if (!work.empty() && work.size() != seq_lens.size()) {
    throw_argument("work", text(work.size(), " numbers"), text("one for each of the ", count, " sequences, or none"));
  }
  for (size_t s = 0; s < work.size(); ++s) check_range(text("work[", s, "]"), work[s], 1 / kMaxMagnitude);
  own.work.assign(work.begin(), work.end());
  return own;
}

Planned Planning::plan(GatheredLengths gathered) const {
  const auto begin = std::chrono::steady_clock::now();
  RECORD_USER_SCOPE("knapformer::make_plan");
  Planned planned{.sample_bytes = std::move(gathered.sample_bytes),
                  .statuses = std::move(gathered.statuses),
                  .observed = std::move(gathered.observed)};
  try {
    PlanInput input = plan_input(options, topology, std::move(gathered), d_model);
    if (shape) {
      planned.step_plan = std::make_shared<StepPlan>(
          plan_step({.sequences = std::move(input), .num_micro_batches = shape->num_micro_batches, .sync = shape->sync},
                    options.solver, options.effort));
    } else {
      planned.step = RankPlan::make(make_plan(std::move(input), options.solver, options.effort), rank);
      planned.step->planning_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    }
  } catch (const ArgumentError& error) {
    planned.refused = error;
  }
  return planned;
}

Planned Planning::plan_with_tables(GatheredLengths gathered, std::span<const TablesDevice> devices) const {
  Planned planned = plan(std::move(gathered));
  RECORD_USER_SCOPE("knapformer::make_tables");
  if (planned.step_plan) {
    for (const Plan& of_micro_batch : planned.step_plan->plans()) {
      planned.micro_batches.push_back(RankPlan::make(of_micro_batch, rank));
    }
  }
  const auto pack = [&](RankPlan& step) {
    for (const TablesDevice& device : devices) step.pack_ahead(device, options.engine);
  };
  if (planned.step) pack(*planned.step);
  for (const std::shared_ptr<RankPlan>& step : planned.micro_batches) pack(*step);
  return planned;
}

}  // namespace knapformer
