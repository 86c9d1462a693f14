// Step time: what a step of a plan costs, by phase. The one cost model: planners minimise it, and
// predictions, reports and timelines print it.
//
// The blocks are alike, so one block stands for all. On rank r one pass over it is, forward,
//
//   | per-token layers | wait | pre_attn | attention, whole and shared sequences | post_attn | wait |
//                             `---- hides behind attention on whole sequences ----'
//
// and backward the same from the right to the left, at its own factors (TrainedModel::passes). Ranks that share
// sequences meet in pre_attn and post_attn: so ranks connected by shared sequences, directly or through others, form a
// group, which takes in each pass its longest per-token phase plus its longest attention phase (exchanges included).
//
// Replicas balance by themselves, and a step takes what its slowest replica takes:
//
//   blocks x (forward + recompute + backward), of the replica's slowest group
//   + route and reverse_route, and their gradients
//   + what FSDP gathers and reduces and the blocks do not hide
//   + a fixed time
//
// docs/cluster_model.md derives each term and holds it against the published table.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "knapformer/core/plan/plan.h"
#include "knapformer/core/plan/plan_json.h"
#include "knapformer/core/util/record.h"

namespace knapformer {

/// What a rank sends, by where it goes. Both links work at once.
struct Traffic {
  double inside = 0;   // to ranks of its node
  double between = 0;  // to ranks of other nodes

  double total() const { return inside + between; }
  Traffic operator*(double by) const { return {inside * by, between * by}; }
  Traffic operator+(const Traffic& other) const { return {inside + other.inside, between + other.between}; }
  /// Of bytes: the slower link, with its latency.
  double seconds(const Cluster& cluster) const;
};

/// Of the columns of a row, the part that `rank` sends to the others of a group in one all-to-all of attention.
Traffic sent_part(const Cluster& cluster, const AttentionShares& shares, Rank rank, Rank first_rank, int32_t degree);

/// The minimum and the maximum of it over the ranks of the group, link by link.
struct SentRange {
  Traffic min, max;
};
SentRange sent_range(const Cluster& cluster, const AttentionShares& shares, Rank first_rank, int32_t degree);

/// Seconds of a block at speed 1, all passes: of a token's layers, and of a (query, key) pair of attention.
struct BlockRates {
  double token_s = 0, pair_s = 0;

  explicit BlockRates(const PlanInput& input);
  /// Of a whole sequence.
  double work_s(const PlanInput& input, SequenceId id) const {
    return static_cast<double>(input.seq_lens[id]) * token_s + input.pairs_of(id) * pair_s;
  }
};

/// Seconds of a block's exchanges, all passes, for each token that a rank holds of a shared sequence and each link,
/// where this part of a row is sent.
Traffic exchange_s_per_token(const PlanInput& input, const Traffic& part);

/// The tensors that travel before attention (q, k and v) and after it (its output), each as wide as the model.
inline constexpr double kPreAttnTensors = 3, kPostAttnTensors = 1;

/// One pass over one block on one rank, in seconds. Fields follow one another in time; backward, from the last on.
struct PassTime {
  double token_s = 0;        // per-token layers
  double wait_before_s = 0;  // for the group's longest per-token phase
  double pre_attn_s = 0;     // all of it
  double hidden_s = 0;       // of pre_attn_s, behind whole_attention_s
  double whole_attention_s = 0;
  double shared_attention_s = 0;
  double post_attn_s = 0;
  double wait_after_s = 0;  // for the group's longest attention phase

  double attention_s() const { return whole_attention_s + shared_attention_s; }
  double exchange_s() const { return pre_attn_s + post_attn_s - hidden_s; }  // not hidden
};

struct RankTime {
  Rank group;         // the first rank of its connected group
  PassTime forward;   // recomputed alike
  PassTime backward;  // zeros where there is none
};

/// Of one replica: blocks, route and FSDP.
struct ReplicaTime {
  double block_s = 0;  // its slowest group's, all passes
  double route_s = 0;
  double step_s = 0;  // without the fixed time
};

/// Terms of a step, in seconds: of its slowest replica, and in it of the slowest group. What prints them derives from
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

struct StepTime : StepTerms {
  /// All terms.
  double total_s() const;

  /// The work divided evenly, and nothing else.
  double ideal_s = 0;
  /// The work alone over all.
  double efficiency() const { return ideal_s == 0 ? 1 : ideal_s / total_s(); }
  /// With the fixed time; and how much longer than that the step is, 1 where there is no work.
  double ideal_step_s() const { return ideal_s + fixed_s; }
  double over_ideal() const { return ideal_s > 0 ? total_s() / ideal_step_s() : 1; }
  /// First rank of the slowest group.
  Rank slowest_group;

  /// Bytes that leave their rank in a step, of all ranks.
  Traffic route_bytes;
  Traffic attention_bytes;
  /// FSDP's, hidden or not: parameters gathered in forward and backward, gradients reduced.
  double fsdp_bytes = 0;

  std::vector<RankTime> ranks;
  std::vector<ReplicaTime> replicas;
};

/// What one rank computes in one block's forward pass, in seconds: measured, in place of work over rate.
struct RankCompute {
  double token_s = 0;
  double whole_attention_s = 0;  // on sequences that lie whole there
  double shared_attention_s = 0;
};

/// Of the plan's own cluster and model. `measured`: per rank, in place of what the plan's work takes at
/// `cluster.flops_per_s`; none: the model. The ideal time is then that of the measured seconds, spread evenly.
/// O(chunks). Throws ArgumentError where a parameter is out of range.
StepTime predict_step(const Plan& plan, std::span<const RankCompute> measured = {});
/// The same plan on another cluster, or of another model.
StepTime predict_step(const Plan& plan, const Cluster& cluster, const TrainedModel& model,
                      std::span<const RankCompute> measured = {});

/// What a replica's step takes with a block of so many seconds, all passes: blocks, FSDP and route. Grows with both.
double replica_step_s(const PlanInput& input, double block_s, double route_s);
/// The longest block with which a replica's step, its route aside, takes at most `step_s`.
double block_budget_s(const PlanInput& input, double step_s);

/// Every sequence on its home rank, whole: the step without a balancer. Its route is empty.
Plan plan_home(const PlanInput& input);

/// Every sequence in its home rank's bag, shared by all ranks of it: static sequence parallelism. Throws ArgumentError
/// where bags are nested.
Plan plan_home_bags(const PlanInput& input);

/// Bytes that ranks send each other in a step, summed over blocks of consecutive ranks: [sender * num_blocks +
/// receiver]. What stays on its rank is nowhere.
struct TrafficMatrix {
  int32_t num_blocks = 0;
  std::vector<double> route, attention;
};
TrafficMatrix step_traffic(const Plan& plan, int32_t ranks_per_block);

}  // namespace knapformer
