// Which topology to train with: candidates for a cluster and a sample of batches, ranked by predicted time.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "knapformer/core/plan.h"

namespace knapformer {

struct TopologyQuestion {
  /// Attention heads. Bags are as large as divides them: uneven shares of the heads the prediction does not see. 0: any
  /// size.
  int32_t num_heads = 0;
  /// As in make_plan. With "greedy" only flat topologies are candidates.
  std::string_view solver = "balanced";
};

struct TopologyOption {
  std::string topology = {};
  /// Of one block, forward, mean over the batches. Infinity where the limit of tokens cannot be kept.
  double predicted_time_s = 0;
  /// predicted over ideal time, mean.
  double efficiency_loss = 0;
  /// Share of the tokens that cross ranks in attention, and the fullest rank's tokens over the mean; means.
  double crossing = 0;
  double max_tokens_over_mean = 0;
  /// In words: what its time goes to.
  std::string reason = {};
};

/// Throws ArgumentError where num_heads is negative, or not 0 and no multiple of the ranks of each of topology's bags.
void check_heads(const Topology& topology, int32_t num_heads);

/// Flat and nested bags of up to two nodes' ranks, whose size divides a node's or is a multiple of it. A batch is what
/// is planned, its topology left out; all have one number of ranks and one cluster. Best first; ties go to the topology
/// with fewer tokens crossing, then to the smaller bags. Topologies that cannot keep max_tokens_per_rank come last, of
/// them those with the largest bags first. Throws ArgumentError.
std::vector<TopologyOption> rank_topologies(std::span<const PlanInput> batches, const TopologyQuestion& question = {});

}  // namespace knapformer
