// The cluster model: predicted time of one block, forward, from a plan.
//
// A rank that holds n of the l tokens of a sequence shared by g ranks spends on it
//
//   per-token phase    24 n d^2 / (speed * flops_per_s)
//   exchange           4 n d * bytes_per_number * (g - 1) / g / bandwidth      where g > 1
//   attention phase    gamma 4 a d / g / (speed * flops_per_s)
//
// The exchange is q, k, v before attention and the output after it: 4 d numbers a token, of which (g - 1) / g leave the
// rank. The bandwidth is the one inside a node where the whole group lies in one, else the one between nodes.
//
// Note on waiting. Ranks that share a sequence wait for each other before attention and after it. So ranks connected by
// shared sequences, directly or through others, form a group, which takes its longest per-token phase plus its
// longest attention phase. The exchange lies between the two waits and belongs to the attention phase: a rank that
// exchanges less may attend longer. The step takes what its slowest group takes.
#pragma once

#include <cstdint>
#include <vector>

#include "knapformer/core/ids.h"

namespace knapformer {

struct ClusterModel {
  double flops_per_s = 400e12;        // sustained, by a rank of speed 1
  double node_bytes_per_s = 200e9;    // a rank's bandwidth to ranks of its node
  double network_bytes_per_s = 25e9;  // a rank's bandwidth to ranks of other nodes
  double bytes_per_number = 2;
  int32_t ranks_per_node = 8;

  /// Throws ArgumentError where a field is not positive, or beyond kMaxMagnitude or its inverse (bandwidths may be
  /// infinite: communication is free).
  void validate() const;

  bool same_node(Rank a, Rank b) const { return a.value / ranks_per_node == b.value / ranks_per_node; }
  /// Seconds that a token of a sequence adds to each rank's exchange, for each of its tokens that the rank holds.
  double exchange_s_per_token(Rank first_rank, int32_t degree, int64_t d_model) const;

  bool operator==(const ClusterModel&) const = default;
};

class Plan;

/// Seconds that a rank spends on one block, forward.
struct RankPhases {
  double token_s = 0;
  double attention_s = 0;  // without the exchange
  double exchange_s = 0;
};

struct BlockTime {
  std::vector<RankPhases> ranks;
  /// Per rank the lowest rank of the group that it waits for.
  std::vector<Rank> group_of_rank;
  /// Per rank the time of its group.
  std::vector<double> group_s;
  double slowest_s = 0;
  /// Total work over ranks and rate: what no plan can beat.
  double ideal_s = 0;

  /// How much longer than ideal; 1 where there is no work.
  double efficiency_loss() const { return ideal_s > 0 ? slowest_s / ideal_s : 1; }
};

BlockTime predict_block_time(const Plan& plan);

}  // namespace knapformer
