#include "knapformer/torch/balancer.h"

#include <ATen/record_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "knapformer/core/util/error.h"

namespace knapformer {

SequenceBalancer::SequenceBalancer(std::string_view topology, BalancerOptions options, ProcessGroupPtr group,
                                   const MakeBagGroup& make_bag_group, const MakeCpuGroup& make_cpu_group)
    : ranks_(std::make_shared<Ranks>(topology, std::move(options), std::move(group), make_bag_group, make_cpu_group)),
      planner_(ranks_) {}

const Topology& SequenceBalancer::topology() const {
  if (!ranks_->is_decided()) {
    throw StateError("topology: is chosen from the first lengths, expected plan_routing before");
  }
  return ranks_->topology();
}

const Step& SequenceBalancer::current() const {
  if (current_) return *current_;
  if (last_step_) {
    throw StateError(
        "follow: has not been called, expected after several micro-batches are planned, before anything moves");
  }
  throw StateError("plan_routing: has made no plan, expected one before anything moves");
}

const Step& SequenceBalancer::current_for(std::string_view call) {
  return ranks_->collective([&]() -> const Step& {
    const Step& step = current();
    const int64_t number = *step_in_backward_;
    const bool runs_again = call != "route" && torch::autograd::get_current_graph_task_id() >= 0;
    if (runs_again && number != 0 && number != step.number()) throw_recomputed(call);
    return step;
  });
}

at::Tensor SequenceBalancer::watched(at::Tensor output) {
  // A leaf is the kernel's own, and not of this step alone.
  if (output.requires_grad() && !output.is_leaf()) {
    output.register_hook(
        [state = step_in_backward_, number = current().number()](const at::Tensor&) -> void { *state = number; });
  }
  return output;
}

void SequenceBalancer::clear() {
  before_step_ = ranks_->traffic();
  current_.reset();
  last_step_.reset();
}

SequenceBalancer::Made* SequenceBalancer::made(const StepPlan& plan) {
  const auto found = std::ranges::find_if(made_, [&](const Made& made) { return made.plan.lock().get() == &plan; });
  return found == made_.end() ? nullptr : &*found;
}

std::shared_ptr<StepPlan> SequenceBalancer::take(const Planned& planned) {
  std::erase_if(made_, [](const Made& made) { return made.plan.expired(); });
  last_step_ = planned.step;
  const std::shared_ptr<StepPlan>& plan = last_step_->plan;
  if (made(*plan) == nullptr) made_.push_back({plan, last_step_, last_step_->first_number});
  if (plan->num_micro_batches() == 1) follow({ranks_, last_step_->micro_batch(0, ranks_->rank())});
  return plan;
}

std::shared_ptr<StepPlan> SequenceBalancer::plan_routing(std::span<const int64_t> seq_lens, int64_t d_model,
                                                         const StepData& data) {
  clear();
  return take(planner_.plan(seq_lens, d_model, data));
}

std::shared_ptr<StepPlan> SequenceBalancer::finish_planning(PlanningAhead& ahead) {
  clear();
  return take(planner_.finish(ahead));
}

void SequenceBalancer::check_fits(const Plan& plan) const {
  if (plan.num_ranks() == num_ranks() && plan.topology() == topology()) return;
  throw_argument("plan", text("one of ", plan.topology().str(), " on ", plan.num_ranks(), " ranks"),
                 text("one of ", topology().str(), " on ", num_ranks(), " ranks, as the balancer's"));
}

Step SequenceBalancer::agreed(const std::shared_ptr<const Plan>& plan) {
  RECORD_USER_SCOPE("knapformer::follow");
  check_fits(*plan);
  if (current_) current_->await_agreement();
  before_step_ = ranks_->traffic();
  planner_.feedback().begin_step();
  const int64_t number = ranks_->take_numbers(1);
  ranks_->enter_step(Fingerprint("follow", number));
  std::shared_ptr<RankPlan> on_rank =
      PlannedStep(std::make_shared<StepPlan>(plan), number).micro_batch(0, ranks_->rank());
  if (ranks_->all()) on_rank->agreement.emplace(*ranks_->all(), *on_rank->plan);
  return {ranks_, std::move(on_rank)};
}

Step SequenceBalancer::step(const StepPlan& plan, int32_t micro_batch) {
  return ranks_->collective([&]() -> Step {
    if (micro_batch < 0 || micro_batch >= plan.num_micro_batches()) {
      throw_argument("micro_batch", micro_batch, text("0 to ", plan.num_micro_batches() - 1));
    }
    Made* known = made(plan);
    if (known == nullptr) return agreed(plan.plan(micro_batch));
    ranks_->enter_step(Fingerprint(text("follow(", micro_batch, ")"), known->first_number + micro_batch));
    before_step_ = ranks_->traffic();
    std::shared_ptr<PlannedStep> on_rank = known->on_rank.lock();
    if (!on_rank) {
      known->on_rank = on_rank = std::make_shared<PlannedStep>(known->plan.lock(), known->first_number);
    }
    return {ranks_, on_rank->micro_batch(micro_batch, ranks_->rank())};
  });
}

const Plan& SequenceBalancer::follow(Step step) {
  current_ = std::move(step);
  *step_in_backward_ = 0;
  planner_.feedback().begin_plan(plan());
  return plan();
}

void SequenceBalancer::expect_device(at::Device device) {
  if (ranks_->all()) ranks_->known_device(device);  // alone: nothing moves
}

void SequenceBalancer::observe(double seconds) {
  static_cast<void>(current());  // throws where there is no plan to have observed
  planner_.feedback().observe(seconds);
}

StepMetrics SequenceBalancer::metrics() {
  const Plan& p = plan();
  const LoadBalance before = p.balance_before(), after = p.balance_after();
  const Ranks::Traffic now = ranks_->traffic();
  const LoadObserver& observer = planner_.feedback().observer();
  return {{"wir_before", before.wir()},
          {"wir_after", after.wir()},
          {"max_over_mean_before", before.max_over_mean()},
          {"max_over_mean_after", after.max_over_mean()},
          {"tokens_before", p.tokens_before()[ranks_->rank().index()]},
          {"tokens_after", p.tokens_after()[ranks_->rank().index()]},
          {"tokens_moved", p.tokens_moved()},
          {"attention_tokens_moved", p.attention_tokens_moved()},
          {"bytes_sent", now.bytes_sent - before_step_.bytes_sent},
          {"num_collectives", now.num_collectives - before_step_.num_collectives},
          {"planning_s", current().planning_s()},
          {"waiting_s", now.waited_s - before_step_.waited_s},
          {"gamma", p.input().workload.gamma},
          {"rank_speed", p.input().speed_of(ranks_->rank())},
          {"given_model_error", observer.given_error()},
          {"learned_model_error", observer.learned_error()}};
}

}  // namespace knapformer
