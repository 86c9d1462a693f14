// From the lengths of all ranks to a step that is ready to run. No other rank is needed, and any thread will do.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "knapformer/core/model/mask.h"
#include "knapformer/core/plan/plan.h"
#include "knapformer/core/planners/planner.h"
#include "knapformer/core/util/error.h"
#include "knapformer/torch/comm/gather_lengths.h"
#include "knapformer/torch/rank_plan.h"

namespace knapformer {

/// How to plan, the same on all ranks.
struct BalancerOptions {
  /// Without lengths, their pairs, topology and width: the balancer fills these in.
  PlanInput plan = {};
  /// As in plan_micro_batch.
  std::string solver = std::string(planners().front().name);
  Effort effort = {};
  /// Of all sequences.
  Mask mask = {};
  /// Of steps of several micro-batches.
  StepSync sync = StepSync::kMicroBatch;
  /// Unset: the one for the tensors' device (exchange/copies.h).
  std::optional<ExchangeEngine> engine = std::nullopt;
};

/// What this rank tells the others of its sequences. Arguments as in SequenceBalancer::plan_routing; checked before
/// other ranks depend on them, so that the ArgumentError names this rank's own mistake.
GatheredLengths checked_lengths(std::span<const int64_t> seq_lens, int64_t d_model, std::span<const Mask> masks,
                                std::span<const double> work, Rank rank);

/// An optimizer step's plan on one rank.
struct PlannedStep {
  PlannedStep(std::shared_ptr<Plan> of, int64_t first)
      : plan(std::move(of)), first_number(first), micro_batches(static_cast<size_t>(plan->num_micro_batches())) {}

  std::shared_ptr<Plan> plan;
  int64_t first_number;                                  // of its micro-batches' steps
  std::vector<std::shared_ptr<RankPlan>> micro_batches;  // null where its tables are yet to be made
  double planning_s = 0;                                 // without the tables; counted with the first that are made

  const std::shared_ptr<RankPlan>& micro_batch(int32_t number, Rank rank);
};

struct Planned {
  // Step or refused is set, unless lengths have to be gathered once more.
  std::shared_ptr<PlannedStep> step = {};
  std::optional<ArgumentError> refused = {};  // no plan can be made, on any rank
  std::optional<StateError> failed = {};      // a rank has no data to plan for

  std::vector<SampleBytes> sample_bytes = {};
  std::vector<DataStatus> statuses = {};  // of each rank
  std::vector<ObservedStep> observed = {};
};

/// All that planning follows beside the lengths: copies, so that it may outlive a balancer.
struct Planning {
  BalancerOptions options;  // with the width, and what was learned from steps, in their PlanInput
  Rank rank;
  int64_t first_number = 0;  // of the steps that will be planned
  int32_t num_micro_batches = 1;

  Planned plan(GatheredLengths gathered) const;
  /// With the tables of every micro-batch, packed for these devices.
  Planned plan_with_tables(GatheredLengths gathered, std::span<const TablesDevice> devices) const;
};

}  // namespace knapformer
