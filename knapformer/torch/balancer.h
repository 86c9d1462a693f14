// SequenceBalancer: plans steps, at once or while another step computes, and gives them to move tensors by.
//
//   SequenceBalancer balancer("g4/2/1n2", {.plan = {.workload = {.gamma = 1.71}}}, group, make_bag_group);
//   balancer.plan_routing(seq_lens, d_model);
//   const Step step = balancer.current();                 // which moves tensors: step.h
//
// Ranks has its groups, and makes an error on one rank an error on all; the rest of planning, for which no other rank
// is needed, is in planning.h. The calls of the published method, which go by the step in force (that of the last
// plan), are Python's.
//
// Methods that plan are collective: all ranks of the group call them in the same order, also ranks without sequences.
// An error on one rank becomes an error on all, which then need a new balancer.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/thread_pool.h>

#include <atomic>
#include <cstdint>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "knapformer/core/model/mask.h"
#include "knapformer/core/plan/micro_batch_plan.h"
#include "knapformer/core/plan/plan.h"
#include "knapformer/torch/comm/gather_lengths.h"
#include "knapformer/torch/feedback.h"
#include "knapformer/torch/planning.h"
#include "knapformer/torch/ranks.h"
#include "knapformer/torch/sample_exchange.h"
#include "knapformer/torch/step.h"

namespace knapformer {

/// What ranks say of their sequences beside the lengths.
struct StepData {
  std::vector<Mask> masks = {};             // of each sequence, where they differ from BalancerOptions::mask; or empty
  std::vector<double> work = {};            // of each, in place of the formula's (PlanInput::give_work); or empty
  int32_t num_micro_batches = 1;            // of the step, the same on all ranks
  bool ended = false;                       // this rank's data has ended: see PlanningAhead::num_ended
  std::optional<std::string> failure = {};  // its data has failed, and why: finishing throws on all ranks
  std::shared_ptr<const Samples> samples = {};  // which move: start_moving
};

/// A step that is planned while another one computes. Held by the caller, who may drop it unfinished if all ranks do:
/// its task ends soon, even where other ranks never come.
class PlanningAhead {
 public:
  PlanningAhead() = default;
  PlanningAhead(const PlanningAhead&) = delete;
  PlanningAhead& operator=(const PlanningAhead&) = delete;
  ~PlanningAhead() { stop_.request_stop(); }

  /// Whether finishing would find its task done.
  bool ready() const { return planned_.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }
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
  std::unique_ptr<SampleExchange> moving_;
  std::shared_ptr<c10::ThreadPool> thread_;  // of the balancer that started it
  std::stop_source stop_;
};

/// What a training loop may log of a step, by name. SequenceBalancer::metrics lists the names.
using StepMetrics = std::map<std::string, std::variant<int64_t, double>>;

/// Not thread-safe: one thread at a time calls it, as ranks must agree on the order of calls anyway. Backward passes
/// may run on autograd's own threads.
class SequenceBalancer {
 public:
  /// Collective over `group`; null stands for one rank alone. Throws ArgumentError where an argument is wrong, and on
  /// all ranks where they differ. Without a backend for the CPU and make_cpu_group, what ranks tell each other queues
  /// behind what the device computes.
  SequenceBalancer(std::string_view topology, BalancerOptions options, ProcessGroupPtr group,
                   const MakeBagGroup& make_bag_group, const MakeCpuGroup& make_cpu_group = nullptr);
  SequenceBalancer(const SequenceBalancer&) = delete;
  SequenceBalancer& operator=(const SequenceBalancer&) = delete;

  /// Gathers all ranks' lengths and plans. seq_lens: tokens of this rank's sequences, each at least 1. d_model: width
  /// of the blocks, in features. A step of one micro-batch is in force until the next plan; of several, step gives each
  /// of them, and follow puts it in force. Exchanges that ran under the plan before keep their backward. Where these
  /// lengths cannot keep max_tokens_per_rank it throws ArgumentError on all ranks, and plans other lengths as before.
  std::shared_ptr<Plan> plan_routing(std::span<const int64_t> seq_lens, int64_t d_model, const StepData& data = {});

  /// As plan_routing in two halves, of which the first launches the gather of lengths and returns, while another step
  /// computes; the rest runs on a thread of its own. Steps that were started may be finished in any order, and again,
  /// as long as all ranks do the same.
  std::shared_ptr<PlanningAhead> start_planning(std::span<const int64_t> seq_lens, int64_t d_model,
                                                const StepData& data);
  std::shared_ptr<Plan> finish_planning(PlanningAhead& ahead);

  /// Between the two halves, where samples are given: waits for the plan, and starts to move them. What has failed is
  /// thrown by finish_planning, so that it ends no step before.
  void start_moving(PlanningAhead& ahead);
  /// After finish_planning, once: this rank's chunks by micro-batch.
  std::vector<std::vector<SampleTensors>> finish_moving(PlanningAhead& ahead);

  /// The step of a plan that this balancer made: nothing is exchanged. Or of one that every rank made by itself, by any
  /// settings, from lengths that are known before the data is loaded: route takes tokens from the plan's home ranks,
  /// and where ranks hold their chunks from the start it is left out. That takes one all-gather of a number, in which
  /// ranks make sure that they have the same plan: the step's first exchange waits for it. Throws ArgumentError where
  /// the plan is of another topology or number of ranks. Collective.
  Step step(const Plan& plan, int32_t micro_batch = 0);
  /// Puts the step in force: what follows goes by it, observe and metrics are of it.
  const MicroBatchPlan& follow(Step step);
  /// The one in force. Throws StateError where there is none.
  const Step& current() const;

  /// The step in force for a call of that name, which is collective. Throws StateError, on all ranks, where there is
  /// none, and where activation checkpointing runs the call again in the backward pass of another step: hold the Step
  /// then.
  const Step& current_for(std::string_view call);
  /// By outputs of the step in force it shows whose backward pass runs. Returns `output`.
  at::Tensor watched(at::Tensor output);

  const MicroBatchPlan& plan() const { return current().plan(); }

  /// Tells the other ranks that this one failed outside of these methods (in a kernel, say) and will not come to the
  /// calls that they wait in: they raise the error too. Not collective.
  void report(const std::exception& error) const noexcept { ranks_->report(error); }

  /// Seconds that this rank was busy with the step in force: its forward and backward passes without waiting for other
  /// ranks. Of a step of micro-batches: with those since the last call, so it may be called after each or once after
  /// all of them. They travel with the lengths of the next plan; all ranks learn the same gamma and speeds from them
  /// (core/model/load_observer.h), which the plan after that one follows. Not collective: a rank may skip steps. Times
  /// that are implausible beside the others are left out, with a warning. Throws ArgumentError where seconds are not
  /// from 1e-12 to 1e12.
  void observe(double seconds);
  /// Of the step in force, as far as it has come. Not collective.
  ///   wir, max_over_mean (_before, _after)  of the planned work per rank (core/plan/load_balance.h)
  ///   tokens_before, tokens_after           of this rank in the plan
  ///   tokens_moved, attention_tokens_moved  of all ranks, as Plan has them
  ///   bytes_sent, num_collectives           of this rank since the step is in force, its planning included
  ///   planning_s                            of the plan and its tables; during an earlier step if planned ahead
  ///   waiting_s                             the host's, for other ranks in this balancer's collectives [1]
  ///   gamma, rank_speed                     what the plan was made with; the speed of this rank
  ///   given_model_error, learned_model_error  of the workload model on what was observed (core/model/load_observer.h)
  /// [1] For tensors of an accelerator its stream waits and not the host: then the waits of planning alone.
  StepMetrics metrics();

  const Topology& topology() const { return ranks_->topology(); }
  int32_t rank() const { return ranks_->rank().value; }
  int32_t num_ranks() const { return ranks_->num_ranks(); }

 private:
  /// A plan that this balancer made, on all ranks alike, and its tables as long as somebody holds them.
  struct Made {
    std::weak_ptr<Plan> plan;
    std::weak_ptr<PlannedStep> on_rank;
    int64_t first_number;  // of its micro-batches' steps
  };
  /// Null for another plan. Plans are the same object or are not the same.
  Made* made(const Plan& plan);
  /// By the options, with what was learned from steps in them.
  Planning planning_of(int64_t d_model, int32_t num_micro_batches) const;
  void begin_step(std::string_view call, const Planning& planning);
  /// Waits for what was started. Collective where lengths did not fit.
  Planned await(PlanningAhead& ahead);
  /// Throws ArgumentError where it was started by another balancer.
  void check_started(const PlanningAhead& ahead) const;
  /// Nothing is in force: a plan is to come.
  void clear();
  /// Learns from what was measured, and throws where there is no plan. Keeps in mind what was planned, and puts it in
  /// force where it has one micro-batch.
  std::shared_ptr<Plan> take(const Planned& planned);
  /// Of a plan that every rank made by itself.
  Step agreed(const MicroBatchPlan& plan);

  std::shared_ptr<Ranks> ranks_;
  std::shared_ptr<LengthGatherer> gatherer_;  // null for one rank alone
  /// For what is planned ahead; null before. One thread, and not one for each task: c10d keeps about 120 bytes for
  /// every thread that has ever waited for a collective.
  std::shared_ptr<c10::ThreadPool> planning_thread_;
  StepFeedback feedback_;
  std::optional<Step> current_;
  std::shared_ptr<PlannedStep> last_step_;  // keeps its tables
  std::vector<Made> made_;
  Ranks::Traffic before_step_;
  /// Number of the step whose backward pass ran last; 0: none since the plan. Shared with hooks, which may outlive
  /// this.
  std::shared_ptr<std::atomic<int64_t>> step_in_backward_ = std::make_shared<std::atomic<int64_t>>(0);
};

}  // namespace knapformer
