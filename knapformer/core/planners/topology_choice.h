// Which topology to train with: candidates for a cluster and a sample of batches, ranked by predicted time.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "knapformer/core/plan/plan.h"

namespace knapformer {

struct TopologyOption {
  std::string topology = {};
  /// Of a step, mean over the batches. Infinity where the limit of tokens cannot be kept.
  double predicted_time_s = 0;
  /// predicted over ideal time, mean.
  double efficiency_loss = 0;
  /// Fraction of the tokens that are exchanged in attention, and the fullest rank's tokens over the mean; means.
  double exchanged_fraction = 0;
  double max_tokens_over_mean = 0;
  /// In words: what its time goes to.
  std::string reason = {};
};

/// Flat and nested bags of up to two nodes' ranks, whose size divides a node's or is a multiple of it. A batch is what
/// is planned, its topology left out; all have one number of ranks and one cluster. Best first; within a thousandth
/// of the time the topology that exchanges fewer tokens, then to the smaller bags. Topologies that cannot keep
/// max_tokens_per_rank come last, of them those with the largest bags first. `solver`: as in make_plan. Throws
/// ArgumentError.
std::vector<TopologyOption> rank_topologies(std::span<const PlanInput> batches, std::string_view solver);

}  // namespace knapformer
