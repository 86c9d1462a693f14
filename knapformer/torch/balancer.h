// SequenceBalancer: plans a step, and moves its tensors.
//
//   SequenceBalancer balancer("g4/2/1n2", {.workload = {.gamma = 0.49}}, group, make_bag_group);
//   balancer.plan_routing(seq_lens, d_model);
//   auto step = balancer.route(x, {ids}, {conditioning});   // (tokens, ...) -> (tokens of this rank's chunks, ...)
//     h = balancer.attention(q, k, v, attend);              // (chunk tokens, heads, head_dim), there and back
//   x = balancer.reverse_route(x).x;                        // back home, in the order of seq_lens
//
// attend(q, k, v, seq_lens) sees whole sequences with a share of the heads. In flat bags its two sides are there too:
//
//     auto a = balancer.pre_attn(q, k, v);                           // (tokens of whole sequences, heads / g, ...)
//     h = balancer.post_attn(attend(a.q, a.k, a.v, a.seq_lens)).o;   // (chunk tokens, heads, ...)
//
// What plans or moves is collective: all ranks of the group (attention, pre_attn, post_attn: of the bag) call it, in
// the same order, also ranks and bags without sequences. Gradients flow through all but plan_routing, so the backward
// pass is collective as well. An error on one rank becomes an error on all, which then need a new balancer. A step
// costs one collective to plan, one for each route and reverse_route, two an attention, none in bags of one; the
// backward pass mirrors them.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "knapformer/core/error.h"
#include "knapformer/core/exchange_table.h"
#include "knapformer/core/mask.h"
#include "knapformer/core/plan.h"
#include "knapformer/core/planner.h"
#include "knapformer/torch/bag_attention.h"
#include "knapformer/torch/channel.h"
#include "knapformer/torch/exchange.h"
#include "knapformer/torch/learn_lengths.h"
#include "knapformer/torch/step_feedback.h"
#include "knapformer/torch/step_metrics.h"

namespace knapformer {

/// How to plan: as in PlanInput and make_plan, the same on all ranks.
struct BalancerOptions {
  WorkloadModel workload = {};
  std::string solver = "balanced";
  Effort effort = {};
  /// Of all sequences.
  Mask mask = {};
  ClusterModel cluster = {};
  std::vector<double> rank_speed = {};
  int64_t max_tokens_per_rank = 0;
  /// Unset: runs for CPU tensors, indices for others.
  std::optional<ExchangeEngine> engine = std::nullopt;
};

/// The plan that these options make.
Plan plan_with(const BalancerOptions& options, const Topology& topology, Learned learned, int64_t d_model);

/// Makes the group of a bag from its ranks, counted inside the balancer's group, in order. Called once, by the bag's
/// ranks alone, and not for bags of one.
using MakeBagGroup = std::function<ProcessGroupPtr(const std::vector<int64_t>& ranks)>;

/// Not thread-safe: one thread at a time calls it, as ranks must agree on the order of calls anyway. Backward passes
/// may run on autograd's own threads.
class SequenceBalancer {
 public:
  /// Collective over `group`; null stands for one rank alone. Throws ArgumentError where an argument is wrong, and on
  /// all ranks where they differ.
  SequenceBalancer(std::string_view topology, BalancerOptions options, ProcessGroupPtr group,
                   const MakeBagGroup& make_bag_group);
  /// In place of making one over `group` (or null): tells the ranks that make theirs why this rank can not.
  static void refuse(const ProcessGroupPtr& group, const std::exception& error) noexcept;
  ~SequenceBalancer();
  SequenceBalancer(const SequenceBalancer&) = delete;
  SequenceBalancer& operator=(const SequenceBalancer&) = delete;

  /// Learns all ranks' lengths and plans. seq_lens: tokens of this rank's sequences, each at least 1. d_model: width of
  /// the blocks, in features. What came before is forgotten; exchanges that already ran keep their backward.
  /// masks: of each of them, where they differ from options.mask; or empty. Where these lengths cannot keep
  /// max_tokens_per_rank it throws ArgumentError on all ranks, and plans others as before.
  const Plan& plan_routing(std::span<const int64_t> seq_lens, int64_t d_model, std::span<const Mask> masks = {});

  /// A step that is planned while another one computes.
  class PlanningAhead;
  struct AheadOptions {
    std::vector<Mask> masks;             // as in plan_routing
    bool ended = false;                  // this rank's data has ended: see PlanningAhead::num_ended
    std::optional<std::string> failure;  // this rank's data has failed, and why: finish_planning throws on all ranks
  };
  /// plan_routing in two halves. This one launches the gather of lengths and returns; the rest runs on a thread of its
  /// own.
  std::shared_ptr<PlanningAhead> start_planning(std::span<const int64_t> seq_lens, int64_t d_model,
                                                const AheadOptions& options);
  /// Waits for what is left of it, and makes it the plan that the calls after this one follow. All ranks finish what
  /// they started, in any order that is the same on all; also again, after others.
  const Plan& finish_planning(PlanningAhead& ahead);

  struct Routed {
    at::Tensor chunk_lens;  // int32 CPU: tokens of the chunks that this rank now holds
    at::Tensor x;           // (tokens of the chunks, ...)
    std::vector<at::Tensor> features;
    std::vector<at::Tensor> sequence_features;  // (chunks, ...)
  };
  /// x and features: (tokens of this rank, ...), any dtype each. sequence_features: (sequences of this rank, ...): a
  /// row goes to every rank that holds a chunk of its sequence; its gradient is the sum from all of them.
  Routed route(const at::Tensor& x, at::TensorList features = {}, at::TensorList sequence_features = {});

  struct Returned {
    at::Tensor seq_lens;  // int32 CPU: tokens of this rank's sequences
    at::Tensor x;         // (tokens of this rank, ...)
  };
  /// x: (tokens of the chunks, ...). Undoes the order of route; any tensor of such rows may be sent home.
  Returned reverse_route(const at::Tensor& x);

  struct AttentionInputs {
    at::Tensor seq_lens;  // int32 CPU: tokens of the sequences that attention sees, whole
    at::Tensor q, k, v;   // (tokens of these, this rank's share of the heads, head_dim)
  };
  /// q: (chunk tokens, heads, head_dim); k and v: (chunk tokens, kv heads, head_dim), kv heads a divisor of heads.
  /// Where the bag's size does not divide them, shares are uneven (knapformer/core/heads.h). Flat topologies alone,
  /// as post_attn: in a nested bag ranks hold other shares of the heads at every level.
  AttentionInputs pre_attn(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);

  struct AttentionOutput {
    at::Tensor chunk_lens;  // int32 CPU
    at::Tensor o;           // (chunk tokens, heads, ...)
  };
  /// o: (tokens of the sequences that attention saw, this rank's share of the query heads, ...).
  AttentionOutput post_attn(const at::Tensor& o);

  /// From chunks to chunks, over flat and nested bags, with what is whole on this rank attended to while the rest
  /// travels. q, k, v as in pre_attn; returns (chunk tokens, heads, ...). See bag_attention.h for `attend`.
  at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Attend& attend);

  /// What a level of attention takes to move its rows: for callers of the op themselves, in a traced graph.
  struct AttentionExchange {
    int32_t degree = 1;
    int32_t index_in_group = 0;
    at::Tensor rows;      // (rows of this rank at the level, 0)
    TableTensors table;   // of these rows, to whole sequences; none where they stay
    at::Tensor seq_lens;  // int32 CPU: tokens of the sequences that attention sees
  };
  /// Of each level of the step, ascending by degree. Not collective.
  std::vector<AttentionExchange> attention_exchanges(at::Device device);
  /// Of the op, of the channel of this rank's bag. Empty in a bag of one.
  std::string bag_channel() const { return bag_ ? bag_->name() : ""; }

  /// Tells the other ranks that this one failed outside of these methods (in attention, say) and will not come to the
  /// calls that they wait in: they raise the error too. Not collective.
  void report(const std::exception& error) noexcept;

  /// Seconds that this rank was busy with the step of the last plan: its forward and backward passes without waiting
  /// for other ranks. Tells the others with the next lengths, so that all refine gamma and the ranks' speeds alike
  /// (core/load_observer.h); the plan after that one follows them. Not collective: a rank may skip steps. Throws
  /// ArgumentError where seconds are not positive and finite.
  void observe(double seconds);
  /// Of the step since the last plan, as far as it has come. Not collective.
  StepMetrics metrics();

  /// Of the last plan_routing. Throws StateError where there was none.
  const Plan& plan() const;
  /// int32 CPU: tokens of this rank's sequences in it.
  const at::Tensor& seq_lens();
  const Topology& topology() const { return topology_; }
  const BalancerOptions& options() const { return options_; }
  int32_t rank() const { return rank_.value; }
  int32_t num_ranks() const { return topology_.num_ranks(); }

 private:
  struct Step;  // what a plan_routing leaves for the calls after it

  void check_options();
  std::shared_ptr<Channel> join_bag(const ProcessGroupPtr& group, const std::string& store_prefix,
                                    const MakeBagGroup& make_bag_group);
  void begin_step(std::string_view call);
  /// step: null where no plan can be made.
  void take_up(std::shared_ptr<Step> step, std::span<const ObservedStep> observed);
  /// Since the balancer was made.
  struct Traffic {
    int64_t bytes_sent = 0, num_collectives = 0;
    double waited_s = 0;
  };
  Traffic traffic() const;
  /// The part of planning that needs no other rank. On any thread.
  static std::shared_ptr<Step> make_step(Learned learned, int64_t d_model, const Topology& topology,
                                         const BalancerOptions& options, Rank rank);
  Step& step();
  /// What is computed again in a backward pass calls attention a second time, and the plan may be another by then.
  void check_recomputation(std::string_view call);
  void check_attention_inputs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);
  void check_flat(std::string_view call) const;
  const std::vector<TableTensors>& tables_on(at::Device device);
  /// Runs the body of a collective method: not after an error, and an error in it becomes the other ranks'.
  template <class Body>
  decltype(auto) collective(Body body);

  BalancerOptions options_;
  Topology topology_;
  Rank rank_;
  std::shared_ptr<Lookout> lookout_;  // null for one rank alone, as the next two
  std::shared_ptr<Channel> all_;
  std::shared_ptr<LengthGatherer> gatherer_;
  std::shared_ptr<Channel> bag_;  // null in a bag of one
  std::shared_ptr<Step> step_;
  StepFeedback feedback_;
  Traffic before_step_;
  double waited_for_planning_s_ = 0;
};

template <class Body>
decltype(auto) SequenceBalancer::collective(Body body) {
  if (!lookout_) return body();
  ErrorBoard& board = *lookout_->board();
  board.check_usable();
  return board.guard(body);
}

/// Held by the caller; may be dropped unfinished, where all ranks do. Its end waits for its thread: soon, also where
/// other ranks never come.
class SequenceBalancer::PlanningAhead {
 public:
  /// Whether finish_planning would find its thread done.
  bool ready() const;
  /// Ranks whose data had ended. Throws StateError before finish_planning.
  int32_t num_ended() const;

 private:
  friend class SequenceBalancer;
  struct Planned {
    // One of the two; neither where lengths have to be gathered once more.
    std::shared_ptr<Step> step;
    std::optional<ArgumentError> refused;  // no plan can be made, on any rank

    std::vector<DataStatus> statuses;  // one a rank
    std::vector<ObservedStep> observed;
  };
  static Planned planned_from(Learned learned, int64_t d_model, const Topology& topology,
                              const BalancerOptions& options, Rank rank);

  int64_t d_model_ = 0;
  BalancerOptions options_;  // refined by what was known at the start
  bool heard_ = false;
  std::optional<LengthGatherer::Pending> gather_;  // none for one rank alone
  std::shared_future<Planned> planned_;
  std::optional<int32_t> num_ended_;
  std::jthread thread_;  // the last member: it ends first
};

}  // namespace knapformer
