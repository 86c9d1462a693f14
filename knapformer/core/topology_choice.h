// Which topology to train with: candidates for a cluster and a sample of batches, ranked by predicted time.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "knapformer/core/plan.h"

namespace knapformer {

struct TopologyQuestion {
  int64_t d_model = 0;
  WorkloadModel workload = {};
  ClusterModel cluster = {};
  /// Attention heads: more ranks than heads cannot share a sequence usefully.
  int32_t num_heads = 1 << 20;
  /// 0: no limit. Topologies that cannot keep it are ranked last.
  int64_t max_tokens_per_rank = 0;
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

/// Flat and nested bags of up to a node's ranks, and of two nodes where those do. Best first; ties go to the topology
/// with fewer tokens crossing, then to the smaller bags. Every batch has the same number of ranks. Throws
/// ArgumentError.
std::vector<TopologyOption> rank_topologies(std::span<const SequenceLengths> batches, const TopologyQuestion& question);

}  // namespace knapformer
