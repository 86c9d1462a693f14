// The choice of a topology to train with: candidates for a cluster and a sample of batches, ranked by predicted time.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "knapformer/core/plan/plan.h"

namespace knapformer {

struct TopologyOption {
  std::string topology = {};
  /// Seconds of a step, and these over the ideal ones: means over the batches, infinite if the limit is not kept.
  double predicted_time_s = 0, over_ideal = 0;
};

/// Flat and nested bags whose size divides a node's, is a multiple of it, or is the job's: of up to two nodes, or more
/// where a sequence needs them; a job with fewer ranks than a node has is one node. The topology of a batch is ignored;
/// all batches have one number of ranks and one cluster. The best comes first; among times within a thousandth, the one
/// that exchanges fewer tokens, then the one with smaller bags. Topologies that cannot keep max_tokens_per_rank come
/// last, the largest bags first. `solver`: as in plan_micro_batch. Throws ArgumentError.
std::vector<TopologyOption> rank_topologies(std::span<const PlanInput> batches, std::string_view solver);

/// The best of rank_topologies for all the step's sequences at once, with the limit of tokens times the micro-batches;
/// of those in which every micro-batch is sure to keep it, if there are any. The input's topology is ignored.
/// `fewest`: for plan_fewest_micro_batches. Throws ArgumentError as rank_topologies does.
std::string best_topology(StepInput input, std::string_view solver, bool fewest);

}  // namespace knapformer
