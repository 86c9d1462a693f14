// From the lengths of all ranks to a step that is ready to run: what needs no other rank, on any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "knapformer/core/model/mask.h"
#include "knapformer/core/model/topology.h"
#include "knapformer/core/plan/step_plan.h"
#include "knapformer/core/util/error.h"
#include "knapformer/torch/balancer_options.h"
#include "knapformer/torch/comm/gather_lengths.h"
#include "knapformer/torch/rank_plan.h"

namespace knapformer {

/// What this rank tells the others of its sequences. Arguments as in SequenceBalancer::plan_routing; checked before
/// other ranks depend on them, so that the ArgumentError names this rank's own mistake.
GatheredLengths own_lengths(std::span<const int64_t> seq_lens, int64_t d_model, std::span<const Mask> masks,
                            std::span<const double> work, Rank rank);

struct Planned {
  // A step, a step plan or a refusal; none where lengths have to be gathered once more.
  std::shared_ptr<RankPlan> step = {};
  std::shared_ptr<const StepPlan> step_plan = {};
  std::vector<std::shared_ptr<RankPlan>> micro_batches = {};  // of step_plan, where it has tables
  std::optional<ArgumentError> refused = {};                  // no plan can be made, on any rank
  std::optional<StateError> failed = {};                      // a rank has no data to plan for

  std::vector<SampleBytes> sample_bytes = {};
  std::vector<DataStatus> statuses = {};  // of each rank
  std::vector<ObservedStep> observed = {};

  bool is_known() const { return step || step_plan || refused; }
};

/// All that planning follows beside the lengths: copies, so that it may outlive a balancer.
struct Planning {
  int64_t d_model = 0;
  Topology topology;
  BalancerOptions options;  // with what was learned from steps in them
  Rank rank;
  std::optional<StepShape> shape = {};  // of an optimizer step that is planned whole

  Planned plan(GatheredLengths gathered) const;
  /// With the tables of every micro-batch, packed for these devices.
  Planned plan_with_tables(GatheredLengths gathered, std::span<const TablesDevice> devices) const;
};

}  // namespace knapformer
