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
  /// Seconds of a step, mean over the batches. Infinity if the limit of tokens cannot be kept.
  double predicted_time_s = 0;
  /// predicted over ideal time, mean.
  double efficiency_loss = 0;
  /// The fraction of the tokens that attention exchanges, and the fullest rank's tokens over the mean rank's; both are
  /// means over the batches.
  double exchanged_fraction = 0;
  double max_tokens_over_mean = 0;
  /// What the time is spent on, in words.
  std::string reason = {};
};

/// Flat and nested bags of up to two nodes' ranks, or more where a sequence needs them, whose size divides a node's or
/// is a multiple of it, or is that of the job; a job with fewer ranks than a node has is one node. The topology of a
/// batch is ignored; all batches have one number of ranks and one cluster. The best comes first; among times within a
/// thousandth, the one that exchanges fewer tokens, then the one with smaller bags. Topologies that cannot keep
/// max_tokens_per_rank come last, the largest bags first. `solver`: as in plan_micro_batch. Throws ArgumentError.
std::vector<TopologyOption> rank_topologies(std::span<const PlanInput> batches, std::string_view solver);

/// In place of the input's topology, the best of rank_topologies for all sequences of the step, whose ranks hold the
/// limit of tokens once in each micro-batch; of those in which every micro-batch is sure to keep it, if there are any.
/// `fewest`: for plan_fewest_micro_batches. Throws ArgumentError as rank_topologies does.
std::string best_topology(StepInput input, std::string_view solver, bool fewest);

}  // namespace knapformer
