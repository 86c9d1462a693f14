// Step time: the time of a plan's step, by phase. This is the only prediction of a step. Planners rank plans by it, and
// search by upper bounds of it (planners/balanced/placement_tree.h); reports print it.
//
// All blocks are alike, so one stands for all. A forward pass over a block on one rank is
//
//   | per-token layers | wait | pre_attn | attention, whole and shared sequences | post_attn | wait |
//                             `---- hides behind attention on whole sequences ----'
//
// and a backward pass is the same from right to left, with its own factors (TrainedModel::passes). Ranks that share
// sequences meet in pre_attn and post_attn: so ranks that shared sequences connect, directly or through other ranks,
// form a group. Each pass of a group takes its longest per-token phase plus its longest attention phase (exchanges
// included).
//
// Each replica is balanced by itself, and a step takes as long as its slowest replica:
//
//   blocks x (forward + recompute + backward), of the replica's slowest group
//   + route and reverse_route, and their gradients
//   + what FSDP gathers and reduces and the blocks do not hide
//   + a fixed time
//
// docs/cluster_model.md derives each term and compares it with the published table.
#pragma once

#include <span>
#include <vector>

#include "knapformer/core/cost/exchange_time.h"
#include "knapformer/core/plan/plan.h"
#include "knapformer/core/util/record.h"

namespace knapformer {

/// Seconds of a block at speed 1, all passes: of one token in the per-token layers, and of one (query, key) pair in
/// attention.
struct BlockRates {
  double token_s = 0, pair_s = 0;

  explicit BlockRates(const PlanInput& input);
  /// The time of a whole sequence.
  double work_s(const PlanInput& input, SequenceId id) const {
    return static_cast<double>(input.seq_lens[id]) * token_s + input.pairs_of(id) * pair_s;
  }
};

/// One pass over one block on one rank, in seconds, without waits. Fields are in the order of time; in a backward pass,
/// in reverse order.
struct PassTime {
  double token_s = 0;     // per-token layers
  double pre_attn_s = 0;  // all of it
  double hidden_s = 0;    // of pre_attn_s, behind whole_attention_s; of keys that come in stages, behind attention
  double whole_attention_s = 0;
  double shared_attention_s = 0;
  double post_attn_s = 0;

  double attention_s() const { return whole_attention_s + shared_attention_s; }
  double exchange_s() const { return pre_attn_s + post_attn_s - hidden_s; }  // not hidden
};

struct RankTime {
  Rank group;          // the first rank of the connected group
  PassTime forward;    // the same in the recomputation
  PassTime backward;   // zeros if there is none
  double block_s = 0;  // of a block in the group, all passes
};

/// Terms of a step, in seconds: of the slowest replica, and there of the slowest group. All prints of them derive from
/// this list.
struct StepTerms {
  double token_s = 0;
  double attention_s = 0;
  double exchange_s = 0;
  double host_s = 0;
  double route_s = 0;
  double fsdp_s = 0;
  double fixed_s = 0;

  /// The blocks alone.
  double blocks_s() const { return token_s + attention_s + exchange_s + host_s; }

  static constexpr auto fields() {
    return std::tuple{field("token_s", &StepTerms::token_s, "per-token layers"),
                      field("attention_s", &StepTerms::attention_s, "attention"),
                      field("exchange_s", &StepTerms::exchange_s, "attention exchange, not hidden"),
                      field("host_s", &StepTerms::host_s, "host copies"),
                      field("route_s", &StepTerms::route_s, "route"),
                      field("fsdp_s", &StepTerms::fsdp_s, "FSDP, not hidden"),
                      field("fixed_s", &StepTerms::fixed_s, "fixed")};
  }
};
static_assert(kListsEveryField<StepTerms>);

struct MicroBatchTime : StepTerms {
  /// All terms.
  double total_s() const;

  /// The time of the work alone, divided evenly.
  double ideal_s = 0;
  /// The ideal time over the total.
  double efficiency() const { return ideal_s == 0 ? 1 : ideal_s / total_s(); }
  /// The ideal time with the fixed time; and the step's time over that, 1 if there is no work.
  double ideal_step_s() const { return ideal_s + fixed_s; }
  double over_ideal() const { return ideal_s > 0 ? total_s() / ideal_step_s() : 1; }

  /// Bytes that leave their rank in a step, of all ranks.
  Traffic route_bytes;
  Traffic attention_bytes;
  /// FSDP's bytes, hidden or not: parameters gathered in forward and backward, gradients reduced.
  double fsdp_bytes = 0;

  std::vector<RankTime> ranks;
  std::vector<double> replica_block_s;  // per replica, of a block in its slowest group, all passes
};

/// Seconds that one rank computes in one block's forward pass: measured, in place of work over rate.
struct RankCompute {
  double token_s = 0;
  double whole_attention_s = 0;  // on sequences that lie whole there
  double shared_attention_s = 0;
};

/// Predicts a step on the plan's cluster and model. `measured`: per rank, in place of the time of the plan's work at
/// `cluster.flops_per_s`; the ideal time is then that of the measured seconds, spread evenly. Empty: the cost model.
/// O(chunks). Throws ArgumentError where a measured time is out of range.
MicroBatchTime predict_micro_batch(const MicroBatchPlan& plan, std::span<const RankCompute> measured = {});

struct StepTime {
  double total_s = 0;
  /// The time of the work divided evenly over the ranks, and the fixed time of each micro-batch.
  double ideal_step_s = 0;
  /// By micro-batch, the time that predict_micro_batch says. These add up to the total if ranks wait in each
  /// micro-batch.
  std::vector<double> micro_batch_s;
};

/// Predicts a step of several micro-batches. With StepSync::kMicroBatch a micro-batch costs what predict_micro_batch
/// says, FSDP's gathers and the fixed time included, and the step is the sum. With kStep each rank goes on as soon as
/// it is done: ranks that share a sequence start when the last of them arrives, and the step ends with the slowest
/// rank. Then gradients are reduced once, after the last micro-batch, and route is counted as if no rank waited in it.
/// O(chunks).
StepTime predict_step(const Plan& plan);

/// The time of a replica's blocks and of FSDP, with a block of `block_s`, all passes. Grows with it.
double replica_step_s(const PlanInput& input, double block_s);
/// The time of a step without route and the fixed time. `block_s`: a replica's blocks
/// (MicroBatchTime::replica_block_s), by micro-batch.
double blocks_and_fsdp_s(const StepInput& input, std::span<const double> block_s);

}  // namespace knapformer
