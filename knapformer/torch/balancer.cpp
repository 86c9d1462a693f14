#include "knapformer/torch/balancer.h"

#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "knapformer/core/util/process.h"

namespace knapformer {

int32_t PlanningAhead::num_ended() const {
  if (!num_ended_) throw StateError("finish_planning: has not been called, expected before num_ended");
  return *num_ended_;
}

SequenceBalancer::SequenceBalancer(std::string_view topology, BalancerOptions options, ProcessGroupPtr group,
                                   const MakeBagGroup& make_bag_group, const MakeCpuGroup& make_cpu_group)
    : ranks_(std::make_shared<Ranks>(topology, std::move(options), std::move(group), make_bag_group, make_cpu_group)),
      feedback_(ranks_->options().plan.workload.gamma, ranks_->options().plan.rank_speed, ranks_->num_ranks()) {
  if (ranks_->all()) gatherer_ = std::make_shared<LengthGatherer>(ranks_->all(), ranks_->balancer());
}

Planning SequenceBalancer::planning_of(int64_t d_model, int32_t num_micro_batches) const {
  Planning planning{.options = ranks_->options(),
                    .rank = ranks_->rank(),
                    .first_number = ranks_->take_numbers(std::max(num_micro_batches, 1)),
                    .num_micro_batches = num_micro_batches};
  PlanInput& plan = planning.options.plan;
  plan.d_model = d_model;
  plan.workload.gamma = feedback_.observer().gamma();
  plan.rank_speed = feedback_.observer().rank_speed();
  return planning;
}

void SequenceBalancer::begin_step(std::string_view call, const Planning& planning) {
  Fingerprint fingerprint(call, planning.first_number);
  fingerprint.add("micro_batches", std::to_string(planning.num_micro_batches));
  ranks_->enter_step(fingerprint);
  feedback_.begin_step();
}

std::shared_ptr<Plan> SequenceBalancer::plan_routing(std::span<const int64_t> seq_lens, int64_t d_model,
                                                     const StepData& data) {
  clear();
  return take(ranks_->collective([&] {
    RECORD_USER_SCOPE("knapformer::plan_routing");
    GatheredLengths lengths = checked_lengths(seq_lens, d_model, data.masks, data.work, ranks_->rank());
    lengths.observed = {feedback_.take()};
    const Planning planning = planning_of(d_model, data.num_micro_batches);
    begin_step("plan_routing", planning);
    if (gatherer_) lengths = gatherer_->finish(gatherer_->start(std::move(lengths), d_model));
    return planning.plan(std::move(lengths));
  }));
}

std::shared_ptr<PlanningAhead> SequenceBalancer::start_planning(std::span<const int64_t> seq_lens, int64_t d_model,
                                                                const StepData& data) {
  return ranks_->collective([&] {
    RECORD_USER_SCOPE("knapformer::start_planning");
    GatheredLengths own = checked_lengths(seq_lens, d_model, data.masks, data.work, ranks_->rank());
    own.statuses = {data.failure ? DataStatus::kFailed : data.ended ? DataStatus::kEnded : DataStatus::kActive};
    own.observed = {feedback_.take()};
    auto ahead = std::make_shared<PlanningAhead>();
    ahead->planning_ = planning_of(d_model, data.num_micro_batches);
    if (!planning_thread_) planning_thread_ = owned_by_this_process(std::make_unique<c10::ThreadPool>(1));
    ahead->thread_ = planning_thread_;
    Fingerprint fingerprint("start_planning");
    fingerprint.add("micro_batches", std::to_string(data.num_micro_batches));
    if (data.samples) {
      KNAPFORMER_ASSERT(std::ranges::equal(data.samples->seq_lens(), seq_lens));
      ahead->samples_ = data.samples;
      own.sample_bytes = data.samples->bytes();
      for (const SampleField& field : data.samples->fields()) {
        fingerprint.add(field.name, field.per_token ? "per token" : "per sample");
      }
    }
    if (gatherer_) {
      if (data.failure) ranks_->peer_errors()->leave_note(PeerErrors::kFailureNote, *data.failure);
      ranks_->agree(fingerprint);
      ahead->gather_ = gatherer_->start(own, d_model);
    }
    // The task has copies of what it needs, so that it may outlive this balancer.
    auto plan = [gather = ahead->gather_, gatherer = gatherer_, own = std::move(own), planning = ahead->planning_,
                 devices = std::vector(ranks_->devices().begin(), ranks_->devices().end()),
                 stop = ahead->stop_.get_token()]() -> Planned {
      std::optional<GatheredLengths> lengths = gather ? gatherer->wait(*gather, stop) : own;
      return lengths ? planning.plan_with_tables(*std::move(lengths), devices) : Planned{};
    };
    const auto task = std::make_shared<std::packaged_task<Planned()>>(std::move(plan));
    ahead->planned_ = task->get_future().share();
    planning_thread_->run([task] { (*task)(); });
    return ahead;
  });
}

Planned SequenceBalancer::await(PlanningAhead& ahead) {
  if (ranks_->all()) {
    const auto begin = std::chrono::steady_clock::now();
    ranks_->peer_errors()->wait("finish_planning", [&](std::chrono::milliseconds patience) {
      return ahead.planned_.wait_for(patience) == std::future_status::ready;
    });
    ranks_->all()->counters().add_wait_since(begin);
  }
  Planned planned = ahead.planned_.get();
  if (!planned.step && !planned.refused) {  // lengths did not fit, on all ranks alike
    planned = ahead.planning_.plan(gatherer_->finish(*ahead.gather_));
    std::promise<Planned> known;
    known.set_value(planned);
    ahead.planned_ = known.get_future().share();
  }
  ahead.num_ended_ = static_cast<int32_t>(std::ranges::count(planned.statuses, DataStatus::kEnded));
  return planned;
}

void SequenceBalancer::check_started(const PlanningAhead& ahead) const {
  if (ahead.thread_ != planning_thread_) throw_argument("ahead", "another balancer's", "what this one started");
}

std::shared_ptr<Plan> SequenceBalancer::finish_planning(PlanningAhead& ahead) {
  clear();
  return take(ranks_->collective([&] {
    RECORD_USER_SCOPE("knapformer::finish_planning");
    check_started(ahead);
    begin_step("finish_planning", ahead.planning_);
    Planned planned = await(ahead);
    if (const auto failed = std::ranges::find(planned.statuses, DataStatus::kFailed);
        failed != planned.statuses.end()) {
      const auto rank = static_cast<int32_t>(failed - planned.statuses.begin());
      const std::optional<std::string> reason =
          ranks_->peer_errors() ? ranks_->peer_errors()->note_of(rank, PeerErrors::kFailureNote) : std::nullopt;
      planned.failed.emplace(text("rank ", rank, ": ", reason.value_or("its data failed")));
    }
    // What ranks observed is heard once, also where a plan is finished again.
    if (std::exchange(ahead.heard_, true)) planned.observed.clear();
    return planned;
  }));
}

void SequenceBalancer::start_moving(PlanningAhead& ahead) {
  ranks_->collective([&] {
    RECORD_USER_SCOPE("knapformer::start_moving");
    check_started(ahead);
    if (!ahead.samples_) throw_argument("ahead", "a step that was started without samples", "one with samples");
    ranks_->agree(Fingerprint("start_moving", ahead.planning_.first_number));
    const Planned planned = await(ahead);
    if (planned.refused || std::ranges::count(planned.statuses, DataStatus::kFailed) > 0) return;
    const bool pinned =
        std::ranges::any_of(ranks_->devices(), [](const TablesDevice& known) { return !known.device.is_cpu(); });
    ahead.moving_ = std::make_unique<SampleExchange>(ranks_->all(), ranks_->rank(), *planned.step->plan,
                                                     *ahead.samples_, planned.sample_bytes, pinned);
  });
}

std::vector<std::vector<SampleTensors>> SequenceBalancer::finish_moving(PlanningAhead& ahead) {
  return ranks_->collective([&] {
    RECORD_USER_SCOPE("knapformer::finish_moving");
    check_started(ahead);
    if (!ahead.moving_) throw StateError("start_moving: has not been called, expected once before finish_moving");
    ranks_->agree(Fingerprint("finish_moving", ahead.planning_.first_number));
    return std::exchange(ahead.moving_, nullptr)->finish();
  });
}

void SequenceBalancer::clear() {
  before_step_ = ranks_->traffic();
  current_.reset();
  last_step_.reset();
}

SequenceBalancer::Made* SequenceBalancer::made(const Plan& plan) {
  const auto found = std::ranges::find_if(made_, [&](const Made& made) { return made.plan.lock().get() == &plan; });
  return found == made_.end() ? nullptr : &*found;
}

std::shared_ptr<Plan> SequenceBalancer::take(const Planned& planned) {
  for (const std::string& warning : feedback_.add(planned.observed)) {
    if (ranks_->rank().value == 0) TORCH_WARN(warning);  // all ranks know
  }
  // On all ranks alike: there is nothing to tell, and nothing is in flight.
  if (planned.failed) throw StateError(*planned.failed);
  if (planned.refused) throw ArgumentError(*planned.refused);
  std::erase_if(made_, [](const Made& made) { return made.plan.expired(); });
  last_step_ = planned.step;
  const std::shared_ptr<Plan>& plan = last_step_->plan;
  if (made(*plan) == nullptr) made_.push_back({plan, last_step_, last_step_->first_number});
  if (plan->num_micro_batches() == 1) follow({ranks_, last_step_->micro_batch(0, ranks_->rank())});
  return plan;
}

Step SequenceBalancer::agreed(const MicroBatchPlan& plan) {
  RECORD_USER_SCOPE("knapformer::follow");
  if (plan.num_ranks() != num_ranks() || plan.topology() != topology()) {
    throw_argument("plan", text("one of ", plan.topology().str(), " on ", plan.num_ranks(), " ranks"),
                   text("one of ", topology().str(), " on ", num_ranks(), " ranks, as the balancer's"));
  }
  if (current_) current_->await_agreement();
  before_step_ = ranks_->traffic();
  feedback_.begin_step();
  const int64_t number = ranks_->take_numbers(1);
  ranks_->enter_step(Fingerprint("follow", number));
  std::shared_ptr<RankPlan> on_rank = PlannedStep(std::make_shared<Plan>(plan), number).micro_batch(0, ranks_->rank());
  if (ranks_->all()) on_rank->agreement.emplace(*ranks_->all(), *on_rank->plan);
  return {ranks_, std::move(on_rank)};
}

Step SequenceBalancer::step(const Plan& plan, int32_t micro_batch) {
  return ranks_->collective([&]() -> Step {
    if (micro_batch < 0 || micro_batch >= plan.num_micro_batches()) {
      throw_argument("micro_batch", micro_batch, text("0 to ", plan.num_micro_batches() - 1));
    }
    Made* known = made(plan);
    if (known == nullptr) return agreed(plan.plans()[micro_batch]);
    ranks_->enter_step(Fingerprint(text("follow(", micro_batch, ")"), known->first_number + micro_batch));
    before_step_ = ranks_->traffic();
    std::shared_ptr<PlannedStep> on_rank = known->on_rank.lock();
    if (!on_rank) {
      known->on_rank = on_rank = std::make_shared<PlannedStep>(known->plan.lock(), known->first_number);
    }
    return {ranks_, on_rank->micro_batch(micro_batch, ranks_->rank())};
  });
}

const MicroBatchPlan& SequenceBalancer::follow(Step step) {
  current_ = std::move(step);
  *step_in_backward_ = 0;
  feedback_.begin_plan(plan());
  return plan();
}

const Step& SequenceBalancer::current() const {
  if (current_) return *current_;
  if (last_step_) {
    throw StateError(
        "follow: has not been called, expected after several micro-batches are planned, before anything moves");
  }
  throw StateError("plan_routing: has made no plan, and follow was given none, expected one before anything moves");
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

void SequenceBalancer::observe(double seconds) {
  static_cast<void>(current());  // throws where there is no plan to have observed
  feedback_.observe(seconds);
}

StepMetrics SequenceBalancer::metrics() {
  const MicroBatchPlan& p = plan();
  const LoadBalance before = p.balance_before(), after = p.balance_after();
  const Ranks::Traffic now = ranks_->traffic();
  const LoadObserver& observer = feedback_.observer();
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
