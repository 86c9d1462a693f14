#include "knapformer/torch/planning.h"

#include <ATen/record_function.h>

#include <chrono>
#include <utility>

#include "knapformer/core/planners/whole_step/step_solver.h"

namespace knapformer {

GatheredLengths checked_lengths(std::span<const int64_t> seq_lens, int64_t d_model, std::span<const Mask> masks,
                                std::span<const double> work, Rank rank) {
  const auto count = static_cast<int64_t>(seq_lens.size());
  GatheredLengths own{.lengths = SequenceLengths({seq_lens.begin(), seq_lens.end()}, std::span(&count, 1), rank.value)};
  if (d_model < 1) throw_argument("d_model", d_model, "at least 1");
  if (!masks.empty() && masks.size() != seq_lens.size()) {
    throw_argument("masks", text(masks.size(), " masks"), text("one for each of the ", count, " sequences, or none"));
  }
  for (size_t s = 0; s < masks.size(); ++s) {
    static_cast<void>(masks[s].pairs(seq_lens[s]));  // which throws for a mask of another length
    own.masks.emplace_back(masks[s]);
  }
  if (!work.empty() && work.size() != seq_lens.size()) {
    throw_argument("work", text(work.size(), " numbers"), text("one for each of the ", count, " sequences, or none"));
  }
  for (size_t s = 0; s < work.size(); ++s) check_range(text("work[", s, "]"), work[s], 1 / kMaxMagnitude);
  own.work.assign(work.begin(), work.end());
  return own;
}

const std::shared_ptr<RankPlan>& PlannedStep::micro_batch(int32_t number, Rank rank) {
  std::shared_ptr<RankPlan>& known = micro_batches[static_cast<size_t>(number)];
  if (!known) {
    known = RankPlan::make(plan, number, rank, first_number + number);
    known->planning_s += std::exchange(planning_s, 0);
  }
  return known;
}

Planned Planning::plan(GatheredLengths gathered) const {
  const auto begin = std::chrono::steady_clock::now();
  RECORD_USER_SCOPE("knapformer::make_plan");
  Planned planned{.sample_bytes = std::move(gathered.sample_bytes),
                  .statuses = std::move(gathered.statuses),
                  .observed = std::move(gathered.observed)};
  try {
    PlanInput input = options.plan;
    input.seq_lens = std::move(gathered.lengths);
    std::vector<Mask> masks;
    for (const std::optional<Mask>& mask : gathered.masks) masks.push_back(mask.value_or(options.mask));
    masks.empty() ? input.give_mask(options.mask) : input.give_masks(std::move(masks));
    if (!gathered.work.empty()) input.give_work(std::move(gathered.work));
    StepInput of_step{.sequences = std::move(input), .num_micro_batches = num_micro_batches, .sync = options.sync};
    planned.step = std::make_shared<PlannedStep>(
        std::make_shared<Plan>(plan_step(std::move(of_step), options.solver, options.effort)), first_number);
    planned.step->planning_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  } catch (const ArgumentError& error) {
    planned.refused = error;
  }
  return planned;
}

Planned Planning::plan_with_tables(GatheredLengths gathered, std::span<const TablesDevice> devices) const {
  Planned planned = plan(std::move(gathered));
  RECORD_USER_SCOPE("knapformer::make_tables");
  for (int32_t k = 0; planned.step && k < planned.step->plan->num_micro_batches(); ++k) {
    for (const TablesDevice& device : devices) planned.step->micro_batch(k, rank)->pack_ahead(device);
  }
  return planned;
}

}  // namespace knapformer
