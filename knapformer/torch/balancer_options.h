// How a balancer plans: its options, and what of them ranks must agree on.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "knapformer/core/model/mask.h"
#include "knapformer/core/plan/plan.h"
#include "knapformer/core/plan/step_plan.h"
#include "knapformer/core/planners/planner.h"
#include "knapformer/torch/comm/fingerprint.h"
#include "knapformer/torch/exchange/exchange.h"

namespace knapformer {

/// How to plan, the same on all ranks.
struct BalancerOptions {
  /// Without lengths, their pairs, topology and width: the balancer fills these in.
  PlanInput plan = {};
  /// As in make_plan.
  std::string solver = std::string(planners().front().name);
  Effort effort = {};
  /// Of all sequences.
  Mask mask = {};
  /// Of steps of several micro-batches.
  StepSync sync = StepSync::kMicroBatch;
  /// Unset: the one for the tensors' device (exchange/copies.h).
  std::optional<ExchangeEngine> engine = std::nullopt;
};

/// In place of a topology: the best one for the first lengths, as rank_topologies has it.
inline constexpr std::string_view kAutoTopology = "auto";

/// Of a balancer with these options: ranks of different ones would plan differently. named: the topology, or
/// kAutoTopology, for which `topology` then stands. Throws ArgumentError where an option is wrong.
Fingerprint fingerprint_of(const BalancerOptions& options, const Topology& topology, std::string_view named);

}  // namespace knapformer
