// SequenceBalancer: plans a step, and moves its tensors.
//
//   SequenceBalancer balancer("g4/2/1n2", {.plan = {.workload = {.gamma = 0.49}}}, group, make_bag_group);
//   balancer.plan_routing(seq_lens, d_model);
//   auto step = balancer.route(x, {ids}, {conditioning});   // (tokens, ...) -> (tokens of this rank's chunks, ...)
//     h = balancer.attention(q, k, v, attend);              // (chunk tokens, heads, head_dim), there and back
//   x = balancer.reverse_route(x).x;                        // back home, in the order of seq_lens
//
// attend(q, k, v, seq_lens) sees whole sequences with a share of the heads, and applies the mask: the plan counts with
// one, and attention is told which one the kernel applies. In flat bags attention's two sides are there too:
//
//     auto a = balancer.pre_attn(q, k, v);                           // (tokens of whole sequences, heads / g, ...)
//     h = balancer.post_attn(attend(a.q, a.k, a.v, a.seq_lens)).o;   // (chunk tokens, heads, ...)
//
// Methods that plan or move tensors are collective. All ranks of the group call them in the same order, also ranks
// without sequences; attention, pre_attn and post_attn are called by all ranks of a bag. Gradients flow through all but
// plan_routing, so the backward pass is collective too. An error on one rank becomes an error on all, which then need a
// new balancer.
//
// Plans of an optimizer step of several micro-batches: plan_step, and then follow_micro_batch for each. A plan that all
// ranks made by themselves, as from lengths known before the data is loaded: follow. Where ranks load what such a plan
// gives them, attention alone moves anything.
//
// Tensors that methods return may share memory with those that they were given: where nothing moves (route on one rank
// alone, attention in a bag of one) they are views. Code that writes into them in place is wrong on any number of
// ranks.
//
// Collectives in a step: one to plan, one for each route and reverse_route, two for each attention (none in bags of
// one), and as many in the backward pass, planning aside.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "knapformer/core/model/mask.h"
#include "knapformer/core/plan/plan.h"
#include "knapformer/core/plan/step_plan.h"
#include "knapformer/core/util/error.h"
#include "knapformer/torch/attention.h"
#include "knapformer/torch/balancer_options.h"
#include "knapformer/torch/comm/comm_group.h"
#include "knapformer/torch/comm/gather_lengths.h"
#include "knapformer/torch/feedback.h"
#include "knapformer/torch/planning.h"
#include "knapformer/torch/sample_exchange.h"
#include "knapformer/torch/task_thread.h"

namespace knapformer {

/// What a training loop may log of a step, by name. SequenceBalancer::metrics lists the names.
using StepMetrics = std::map<std::string, std::variant<int64_t, double>>;

/// Makes the group of a bag from its ranks, counted inside the balancer's group, in order. Called once, by the bag's
/// ranks alone, and not for bags of one.
using MakeBagGroup = std::function<ProcessGroupPtr(const std::vector<int64_t>& ranks)>;
/// Makes a group of all ranks for tensors on the CPU. Called once, by all ranks, where the balancer's group has no
/// backend for them.
using MakeCpuGroup = std::function<ProcessGroupPtr()>;

/// Not thread-safe: one thread at a time calls it, as ranks must agree on the order of calls anyway. Backward passes
/// may run on autograd's own threads.
class SequenceBalancer {
 public:
  /// Collective over `group`; null stands for one rank alone. topology: its text, or "auto" for the best one for the
  /// first lengths that are planned, on all ranks alike; bags have their groups made then. Throws ArgumentError where
  /// an argument is wrong, and on all ranks where they differ. Without a backend for the CPU and make_cpu_group, what
  /// ranks tell each other queues behind what the device computes.
  SequenceBalancer(std::string_view topology, BalancerOptions options, ProcessGroupPtr group,
                   const MakeBagGroup& make_bag_group, const MakeCpuGroup& make_cpu_group = nullptr);
  /// Instead of making one over `group` (or null): tells the ranks that make theirs why this rank cannot.
  static void refuse(const ProcessGroupPtr& group, const std::exception& error) noexcept;
  ~SequenceBalancer();
  SequenceBalancer(const SequenceBalancer&) = delete;
  SequenceBalancer& operator=(const SequenceBalancer&) = delete;

  /// Gathers all ranks' lengths and plans. seq_lens: tokens of this rank's sequences, each at least 1. d_model: width
  /// of the blocks, in features. masks: of each sequence, where they differ from options.mask; or empty. work: of each
  /// sequence, in place of the formula's (PlanInput::give_work); or empty, on all ranks that have sequences. The plan
  /// before is forgotten; exchanges that ran under it keep their backward. Where these lengths cannot keep
  /// max_tokens_per_rank it throws ArgumentError on all ranks, and plans other lengths as before.
  const Plan& plan_routing(std::span<const int64_t> seq_lens, int64_t d_model, std::span<const Mask> masks = {},
                           std::span<const double> work = {});

  /// Gathers all ranks' lengths of an optimizer step, once, and plans its micro-batches together. The rest as in
  /// plan_routing, but that no plan is in force before follow_micro_batch.
  const StepPlan& plan_step(std::span<const int64_t> seq_lens, int64_t d_model, const StepShape& shape,
                            std::span<const Mask> masks = {}, std::span<const double> work = {});
  /// Makes a micro-batch's plan of the last step the one in force: route takes this rank's sequences of it, in their
  /// order. Any number of times, in any order, the same on all ranks; nothing is exchanged.
  const Plan& follow_micro_batch(int64_t micro_batch);

  /// Makes a plan that all ranks have the one in force, without lengths of any rank. It need not be made by these
  /// options. route takes tokens from the plan's home ranks; where ranks hold their chunks from the start it is left
  /// out. One all-gather of a number, in which ranks make sure that they follow the same plan: the next exchange waits
  /// for it. Throws ArgumentError where the plan is of another topology or number of ranks.
  const Plan& follow(const Plan& plan);

  /// A step that is planned while another one computes.
  class PlanningAhead;
  struct AheadOptions {
    std::vector<Mask> masks = {};                 // as in plan_routing
    std::vector<double> work = {};                // likewise
    bool ended = false;                           // this rank's data has ended: see PlanningAhead::num_ended
    std::optional<std::string> failure = {};      // its data has failed, and why: finish_planning throws on all ranks
    std::optional<StepShape> step = {};           // plan an optimizer step, as plan_step does
    std::shared_ptr<const Samples> samples = {};  // its samples, which move: start_moving
    int64_t max_bytes_in_flight = 0;              // of them, as in SampleExchange
  };
  /// The first half of plan_routing: launches the gather of lengths and returns. The rest of planning runs on a thread
  /// of its own.
  std::shared_ptr<PlanningAhead> start_planning(std::span<const int64_t> seq_lens, int64_t d_model,
                                                const AheadOptions& options);
  /// The second half: waits for the rest of planning, and makes the plan the one in force. Plans that were started may
  /// be finished in any order, and again after others, as long as all ranks do the same.
  const Plan& finish_planning(PlanningAhead& ahead);
  /// The same where a step was started.
  const StepPlan& finish_planning_step(PlanningAhead& ahead);
  /// Whether the step in force is that of `ahead`: no other was planned or taken up since it was finished.
  bool is_in_force(const PlanningAhead& ahead) const;
  /// Between the two halves, where samples are given: waits for the plan, and starts to move them. What has failed is
  /// thrown by finish_planning_step, so that it ends no step before.
  void start_moving(PlanningAhead& ahead);
  /// After finish_planning_step, once: this rank's chunks by micro-batch. Throws ArgumentError on all ranks where a
  /// sample is larger than max_bytes_in_flight.
  std::vector<std::vector<SampleTensors>> finish_moving(PlanningAhead& ahead);

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
  /// x: (tokens of the chunks, ...), in the order in which route gave them.
  Returned reverse_route(const at::Tensor& x);

  struct AttentionInputs {
    at::Tensor seq_lens;  // int32 CPU: tokens of the sequences that attention sees, whole
    at::Tensor q, k, v;   // (tokens of these, this rank's share of the heads, head_dim)
  };
  /// q: (chunk tokens, heads, head_dim); k and v: (chunk tokens, kv heads, head_dim), kv heads a divisor of heads.
  /// Where the bag's size does not divide them, shares are uneven (knapformer/core/plan/heads.h). For flat
  /// topologies, as post_attn: in a nested bag a rank has another share of the heads at each level. mask: the one that
  /// the kernel applies. Throws ArgumentError where another one was planned for any sequence of any rank.
  AttentionInputs pre_attn(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const KernelMask& mask = Mask());

  struct AttentionOutput {
    at::Tensor chunk_lens;  // int32 CPU
    at::Tensor o;           // (chunk tokens, heads, ...)
  };
  /// o: (tokens of the sequences that attention saw, this rank's share of the query heads, ...).
  AttentionOutput post_attn(const at::Tensor& o);

  /// Attention of chunk tokens over their whole sequences, in flat and nested bags (attention.h). q, k, v as in
  /// pre_attn, and mask; returns (chunk tokens, heads, ...).
  at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Attend& attend,
                       const KernelMask& mask = Mask());

  /// What composes attention in this step, for tensors on this device. For compiled blocks, which call the op
  /// themselves. mask: as in pre_attn. Valid until the next plan. Not collective.
  Ulysses ulysses_on(at::Device device, const KernelMask& mask = Mask());

  /// Tensors on this device will come: what is planned ahead from now on packs its index tables for it. Without, a
  /// balancer knows a device from the first exchange there. Not collective.
  void expect_device(at::Device device);

  /// Tells the other ranks that this one failed outside of these methods (in a kernel, say) and will not come to the
  /// calls that they wait in: they raise the error too. Not collective.
  void report(const std::exception& error) noexcept;

  /// Seconds that this rank was busy with the step of the last plan: its forward and backward passes without waiting
  /// for other ranks. Of a step of micro-batches: with those since the last call, so it may be called after each or
  /// once after all of them. They travel with the lengths of the next plan; all ranks learn the same gamma and speeds
  /// from them (core/model/load_observer.h), which the plan after that one follows. Not collective: a rank may skip
  /// steps. Times that are implausible beside the others are left out, with a warning. Throws ArgumentError where
  /// seconds are not from 1e-12 to 1e12.
  void observe(double seconds);
  /// Of the step since the last plan, as far as it has come. Not collective.
  ///   wir, max_over_mean (_before, _after)  of the planned work per rank (core/plan/load_balance.h)
  ///   tokens_before, tokens_after           of this rank in the plan
  ///   tokens_moved, attention_tokens_moved  of all ranks: by a route, by each exchange of an attention
  ///   bytes_sent, num_collectives           of this rank since the plan
  ///   planning_s                            of the plan and its tables; during an earlier step if planned ahead
  ///   waiting_s                             the host's, for other ranks in this balancer's collectives [1]
  ///   gamma, rank_speed                     what the plan was made with; the speed of this rank
  ///   given_model_error, learned_model_error  of the workload model on what was observed (core/model/load_observer.h)
  /// [1] For tensors of an accelerator its stream waits and not the host: then the waits of planning, and of a rank
  ///     without rows until it is told which gradients travel.
  StepMetrics metrics();

  /// The one in force. Throws StateError where there is none.
  const Plan& plan() const;
  /// int32 CPU: tokens of this rank's sequences in it, and of the chunks that this rank holds.
  const at::Tensor& seq_lens() const;
  const at::Tensor& chunk_lens() const;
  /// Throws StateError where it is "auto", and no lengths have been planned.
  const Topology& topology() const;
  const BalancerOptions& options() const { return options_; }
  int32_t rank() const { return rank_.value; }
  int32_t num_ranks() const { return topology_.num_ranks(); }

 private:
  /// Since the balancer was made.
  struct Traffic {
    int64_t bytes_sent = 0, num_collectives = 0;
    double waited_s = 0;
  };

  /// How the bag of this rank gets its group, where it has several ranks.
  struct BagMaking {
    ProcessGroupPtr group;
    std::string store_prefix;
    MakeBagGroup make_bag_group;
  };
  /// The groups of all bags. Collective over the group.
  void join_bags(const BagMaking& making);
  std::shared_ptr<CommGroup> join_bag(const BagMaking& making) const;
  /// Where the topology is "auto", and these lengths are the first. Collective then.
  void choose_topology(const GatheredLengths& lengths, Planning& planning);
  /// By the options, with what was learned from steps in them.
  Planning planning_of(int64_t d_model, const std::optional<StepShape>& shape) const;
  void begin_step(std::string_view call, const std::optional<StepShape>& shape = {});
  Planned gather_and_plan(std::string_view call, std::span<const int64_t> seq_lens, int64_t d_model,
                          std::span<const Mask> masks, std::span<const double> work,
                          const std::optional<StepShape>& shape);
  static std::shared_future<Planned> known(Planned planned);
  /// Waits for what was started. Collective where lengths did not fit.
  Planned await(PlanningAhead& ahead);
  Planned finish(PlanningAhead& ahead, bool of_step);
  /// Throws ArgumentError where it was started by another balancer, or is not of a step where one is expected.
  void check_started(const PlanningAhead& ahead, bool of_step) const;
  /// Makes it the plan in force, or the step whose micro-batches are followed. Throws where there is none.
  void take_up(Planned planned);
  const Plan& take_up(std::shared_ptr<RankPlan> step);
  /// Waits until it is known that all ranks follow the same plan in this step.
  void await_agreement(RankPlan& step);
  Traffic traffic() const;
  RankPlan& step() const;
  const RankPlan::PackedTables& tables_on(at::Device device);
  /// That of devices_, where it is from now on.
  const TablesDevice& known_device(at::Device device);
  /// Notes in step_in_backward_ when a backward pass comes by `output`, which is of the present step.
  void watch_backward(const at::Tensor& output);
  /// Attention that is computed again in a backward pass (activation checkpointing) goes by the plan in force. Throws
  /// where another plan's backward pass runs.
  void check_recomputation(std::string_view call);
  void check_attention_inputs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);
  /// Looks at every sequence once a plan.
  void check_mask(const KernelMask& mask);
  Ulysses ulysses(at::Device device);
  void check_flat(std::string_view call) const;
  /// Runs the body of a collective method. Throws after an earlier error; tells other ranks of an error in the body.
  template <class Body>
  decltype(auto) collective(Body body);

  BalancerOptions options_;
  Topology topology_;                   // bags of one where it is yet to be chosen
  std::optional<BagMaking> undecided_;  // where it is
  Rank rank_;
  std::shared_ptr<Watchdog> watchdog_;  // null for one rank alone, as the next two
  std::shared_ptr<CommGroup> all_;
  std::shared_ptr<LengthGatherer> gatherer_;
  std::shared_ptr<CommGroup> bag_;  // null in a bag of one
  std::shared_ptr<RankPlan> step_;
  std::shared_ptr<const StepPlan> step_plan_;
  std::vector<std::shared_ptr<RankPlan>> micro_batches_;  // of step_plan_; empty where each is made when followed
  std::vector<TablesDevice> devices_;                     // for which tables were asked so far, or will be
  /// Number of the step whose backward pass ran last; 0: none since the plan. Shared with hooks, which may outlive
  /// this.
  std::shared_ptr<std::atomic<int64_t>> step_in_backward_ = std::make_shared<std::atomic<int64_t>>(0);
  std::shared_ptr<TaskThread> planning_thread_ = TaskThread::make();  // for what is planned ahead
  StepFeedback feedback_;
  Traffic before_step_;
  double waited_for_planning_s_ = 0;
};

template <class Body>
decltype(auto) SequenceBalancer::collective(Body body) {
  if (!watchdog_) return body();
  watchdog_->check_usable();
  return watchdog_->guard(body);
}

/// Held by the caller, who may drop it unfinished if all ranks do. Its destructor waits for its task, which ends soon
/// even where other ranks never come.
class SequenceBalancer::PlanningAhead {
 public:
  /// Whether finish_planning would find its task done.
  bool ready() const;
  /// Ranks whose data had ended. Throws StateError before start_moving or finish_planning.
  int32_t num_ended() const;

 private:
  friend class SequenceBalancer;
  Planning planning_;  // with what was known at the start
  bool heard_ = false;
  std::optional<LengthGatherer::Pending> gather_;  // none for one rank alone
  std::shared_future<Planned> planned_;
  std::optional<int32_t> num_ended_;
  std::shared_ptr<const Samples> samples_;
  int64_t max_bytes_in_flight_ = 0;
  std::unique_ptr<SampleExchange> moving_;
  std::optional<ArgumentError> too_large_;  // a sample
  std::shared_ptr<TaskThread> thread_;      // of the balancer that started it
  TaskThread::Task task_;                   // the last member: it ends first
};

}  // namespace knapformer
