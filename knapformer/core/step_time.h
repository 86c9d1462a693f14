// Step time: the predicted forward and backward time of one training step under a plan, on a given cluster.
//
// The blocks are alike, so one block stands for all. On rank r its forward pass is
//
//   | per-token layers | wait | pre_attn | attention on a share of the heads | post_attn | wait |
//
// Ranks that share sequences meet in pre_attn and post_attn, so a connected group of ranks takes its longest per-token
// phase plus its longest attention phase (exchanges included). A step is, for the slowest group,
//
//   blocks x (forward + recompute + backward)     backward computes twice the forward, and exchanges as much
//   + route and reverse_route, and their gradients
//   + what FSDP gathers and reduces and the blocks do not hide
//   + the host's cost of every piece it copies (none here; the published implementation's, see below)
//   + a fixed time
//
// docs/cluster_model.md derives each term and holds it against the published table.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "knapformer/core/plan.h"

namespace knapformer {

/// What a rank and its links do. Defaults are H100 nodes: 8 ranks on NVLink, one 400 Gb/s adapter each. "Fitted" is
/// fitted to the 15 rows of the paper's Table 1 by docs/cluster_model.py, which writes the residuals into
/// docs/cluster_model.md.
struct HardwareModel {
  /// Matrix-product FLOP/s that a rank sustains over whole blocks. Fitted.
  double flops_per_s = 2.98e14;
  int32_t ranks_per_node = 8;
  /// Bytes/s that a rank sends in an all-to-all inside its node, packing included. Fitted.
  double node_bytes_per_s = 1.20e11;
  /// Bytes/s that a rank sends to other nodes: half the line rate of its 400 Gb/s adapter.
  double network_bytes_per_s = 2.5e10;
  /// Seconds before the first byte of an exchange: launch and one hop, as in NCCL's tuning table (8.4 + 3.4 and 8.4 +
  /// 14 us).
  double node_latency_s = 11.8e-6;
  double network_latency_s = 22.4e-6;
  /// Seconds a step, whatever its load: kernel launches, embeddings, loss. Fitted.
  double fixed_s = 0.525;
  /// Host seconds per block for every piece (a chunk, times the ranks that share it) copied one by one. The published
  /// implementation copies so; this one moves rows by one table per exchange.
  double host_s_per_piece = 0;
  /// Attention on sequences that are whole on a rank runs while pre_attn travels, in forward and recompute.
  bool overlaps_attention = false;

  /// The cluster and the implementation that the paper measured: these defaults, plus the host's cost per piece
  /// (fitted).
  static HardwareModel published();

  /// Throws ArgumentError, naming the field.
  void validate() const;
  bool operator==(const HardwareModel&) const = default;
};

/// What is trained. Defaults are the paper's: FLUX, 19 double-stream and 38 single-stream blocks.
struct TrainedModel {
  int32_t num_blocks = 57;
  double num_parameters = 12e9;
  int32_t bytes_per_number = 2;
  /// Activation checkpointing: every block's forward runs again before its backward.
  bool recomputes = true;
  /// Ranks over which FSDP shards the parameters; more ranks hold copies and all-reduce gradients. 32 as in the paper.
  int32_t shard_ranks = 32;
  /// Bytes that travel with each token beside its features (positions and the like).
  int32_t side_bytes_per_token = 0;

  void validate() const;
  bool operator==(const TrainedModel&) const = default;
};

/// One block's forward pass on one rank, in seconds. Fields follow one another in time.
struct RankTime {
  int32_t group = 0;             // the first rank of its connected group
  double token_s = 0;            // per-token layers
  double wait_before_s = 0;      // for the group's longest per-token phase
  double pre_attn_s = 0;         // all of it, hidden or not
  double whole_attention_s = 0;  // on sequences that lie whole here; runs beside pre_attn where that overlaps
  double shared_attention_s = 0;
  double post_attn_s = 0;
  double wait_after_s = 0;  // for the group's longest attention phase

  double compute_s() const { return token_s + whole_attention_s + shared_attention_s; }
};

struct StepTime {
  /// Terms of the slowest group; they add up to total_s().
  double token_s = 0;
  double attention_s = 0;
  double exchange_s = 0;  // attention's all-to-alls, what is not hidden
  double route_s = 0;
  double fsdp_s = 0;  // what is not hidden
  double host_s = 0;
  double fixed_s = 0;
  double total_s() const { return token_s + attention_s + exchange_s + route_s + fsdp_s + host_s + fixed_s; }

  /// The work divided evenly, and nothing else.
  double ideal_s = 0;
  double efficiency() const { return ideal_s == 0 ? 1 : ideal_s / total_s(); }
  /// First rank of the slowest group.
  Rank slowest_group;

  /// Bytes that cross ranks in a step, of all ranks; and those of them that leave a node.
  double route_bytes = 0;
  double route_bytes_between_nodes = 0;
  double attention_bytes = 0;
  double attention_bytes_between_nodes = 0;

  std::vector<RankTime> ranks;
};

/// What one rank computes in one block's forward pass, in seconds: measured, in place of work over rate.
struct RankCompute {
  double token_s = 0;
  double whole_attention_s = 0;  // on sequences that lie whole there
  double shared_attention_s = 0;
};

/// `measured`: per rank, in place of what the plan's work takes at `hardware.flops_per_s`; none: the model. The ideal
/// time is then that of the measured seconds, spread evenly.
/// Throws ArgumentError where a parameter is out of range.
StepTime predict_step(const Plan& plan, const HardwareModel& hardware, const TrainedModel& model,
                      std::span<const RankCompute> measured = {});

/// Every sequence on its home rank, whole: the step without a balancer. Its route is empty.
Plan plan_home(const PlanInput& input);

}  // namespace knapformer
