// SequenceBalancer's planning: from lengths to a step, at once or ahead, and what it learns from steps.
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <chrono>

#include "knapformer/core/error.h"
#include "knapformer/torch/balancer_step.h"

namespace knapformer {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

at::Tensor lengths_tensor(std::span<const int64_t> lens) {
  const at::Tensor tensor = at::empty({static_cast<int64_t>(lens.size())}, at::TensorOptions().dtype(at::kInt));
  std::copy(lens.begin(), lens.end(), tensor.mutable_data_ptr<int32_t>());
  return tensor;
}

/// Of this rank, checked before any other depends on them: so that the error names this rank's own mistake.
Learned own_lengths(std::span<const int64_t> seq_lens, int64_t d_model, std::span<const Mask> masks) {
  const auto count = static_cast<int64_t>(seq_lens.size());
  Learned own{.lengths = SequenceLengths({seq_lens.begin(), seq_lens.end()}, std::span(&count, 1))};
  if (d_model < 1) throw_argument("d_model", d_model, "at least 1");
  if (!masks.empty() && masks.size() != seq_lens.size()) {
    throw_argument("masks", text(masks.size(), " masks"), text("one for each of the ", count, " sequences, or none"));
  }
  for (size_t s = 0; s < masks.size(); ++s) own.attention_pairs.push_back(masks[s].pairs(seq_lens[s]));
  return own;
}

DataStatus status_of(const SequenceBalancer::AheadOptions& options) {
  if (options.failure) return DataStatus::kFailed;
  return options.ended ? DataStatus::kEnded : DataStatus::kActive;
}

}  // namespace

Plan plan_with(const BalancerOptions& options, const Topology& topology, Learned learned, int64_t d_model) {
  PlanInput input{.seq_lens = std::move(learned.lengths),
                  .topology = topology,
                  .d_model = d_model,
                  .workload = options.workload,
                  .attention_pairs = std::move(learned.attention_pairs),
                  .cluster = options.cluster,
                  .rank_speed = options.rank_speed,
                  .max_tokens_per_rank = options.max_tokens_per_rank};
  if (input.attention_pairs.empty() && options.mask.kind != Mask::Kind::kFull) {
    input.attention_pairs.assign(input.seq_lens.lens().size(), kDefaultPairs);
  }
  for (size_t s = 0; s < input.attention_pairs.size(); ++s) {
    int64_t& pairs = input.attention_pairs[s];
    if (pairs == kDefaultPairs) pairs = options.mask.pairs(input.seq_lens.lens()[s]);
  }
  return make_plan(std::move(input), options.solver, options.effort);
}

void SequenceBalancer::begin_step(std::string_view call) {
  if (all_) {
    all_->agreement().agree(Statement(call));
    all_->agreement().begin_step();
  }
  if (bag_ && bag_ != all_) bag_->agreement().begin_step();
  before_step_ = traffic();
}

void SequenceBalancer::take_up(std::shared_ptr<Step> step, std::span<const ObservedStep> observed) {
  step_ = std::move(step);
  for (Channel* channel : {all_.get(), bag_.get()}) {
    if (channel != nullptr) channel->plan_in_backward() = 0;
  }
  const bool drifted_now = feedback_.add(observed);
  if (drifted_now && rank_.value == 0) TORCH_WARN(feedback_.drift_message());  // all ranks know
  if (step_) feedback_.begin_plan(step_->plan);
}

std::shared_ptr<SequenceBalancer::Step> SequenceBalancer::make_step(Learned learned, int64_t d_model,
                                                                    const Topology& topology,
                                                                    const BalancerOptions& options, Rank rank) {
  const auto begin = Clock::now();
  RECORD_USER_SCOPE("knapformer::make_plan");
  Plan plan = plan_with(options, topology, std::move(learned), d_model);
  RouteTables route = make_route_tables(plan, rank);
  AttentionTables attention = make_attention_tables(plan, rank);
  at::Tensor own_lens = lengths_tensor(plan.seq_lens().lens(rank)), chunk_lens = lengths_tensor(route.chunk_lens);
  std::vector<at::Tensor> attn_lens;
  for (const AttentionLevel& level : attention.levels) attn_lens.push_back(lengths_tensor(level.seq_lens));
  static std::atomic<int64_t> num_made = 0;
  auto step = std::make_shared<Step>(Step{.number = ++num_made,
                                          .plan = std::move(plan),
                                          .route = std::move(route),
                                          .attention = std::move(attention),
                                          .seq_lens = std::move(own_lens),
                                          .chunk_lens = std::move(chunk_lens),
                                          .attn_lens = std::move(attn_lens),
                                          .planning_s = 0,
                                          .heads = {},
                                          .device = {},
                                          .tables = {}});
  step->planning_s = seconds_since(begin);
  return step;
}

const Plan& SequenceBalancer::plan_routing(std::span<const int64_t> seq_lens, int64_t d_model,
                                           std::span<const Mask> masks) {
  std::optional<ArgumentError> refused;
  collective([&] {
    RECORD_USER_SCOPE("knapformer::plan_routing");
    Learned learned = own_lengths(seq_lens, d_model, masks);
    learned.observed = {feedback_.take()};
    const BalancerOptions options = feedback_.refined(options_);
    begin_step("plan_routing");
    if (all_) {
      learned = gatherer_->finish(
          gatherer_->start(seq_lens, learned.attention_pairs, {.d_model = d_model, .observed = learned.observed[0]}));
    }
    PlanningAhead::Planned planned =
        PlanningAhead::planned_from(std::move(learned), d_model, topology_, options, rank_);
    take_up(std::move(planned.step), planned.observed);
    refused = std::move(planned.refused);
  });
  if (refused) throw ArgumentError(*refused);  // on all ranks alike: nothing to tell, and nothing is in flight
  return step_->plan;
}

SequenceBalancer::PlanningAhead::Planned SequenceBalancer::PlanningAhead::planned_from(Learned learned, int64_t d_model,
                                                                                       const Topology& topology,
                                                                                       const BalancerOptions& options,
                                                                                       Rank rank) {
  Planned planned{
      .step = nullptr, .refused = {}, .statuses = std::move(learned.statuses), .observed = std::move(learned.observed)};
  try {
    planned.step = make_step(std::move(learned), d_model, topology, options, rank);
  } catch (const ArgumentError& error) {
    planned.refused = error;
  }
  return planned;
}

std::shared_ptr<SequenceBalancer::PlanningAhead> SequenceBalancer::start_planning(std::span<const int64_t> seq_lens,
                                                                                  int64_t d_model,
                                                                                  const AheadOptions& options) {
  return collective([&] {
    RECORD_USER_SCOPE("knapformer::start_planning");
    Learned own = own_lengths(seq_lens, d_model, options.masks);
    own.statuses = {status_of(options)};
    own.observed = {feedback_.take()};
    auto ahead = std::make_shared<PlanningAhead>();
    ahead->d_model_ = d_model;
    ahead->options_ = feedback_.refined(options_);
    if (all_) {
      if (options.failure) all_->board().leave_reason(*options.failure);
      all_->agreement().agree(Statement("start_planning"));
      ahead->gather_ = gatherer_->start(seq_lens, own.attention_pairs,
                                        {.d_model = d_model, .status = own.statuses[0], .observed = own.observed[0]});
    }
    // The thread has copies of what it needs, so that it may outlive this balancer.
    auto plan = [gather = ahead->gather_, gatherer = gatherer_, own = std::move(own), d_model, topology = topology_,
                 planning = ahead->options_, rank = rank_](const std::stop_token& stop) -> PlanningAhead::Planned {
      std::optional<Learned> learned = gather ? gatherer->wait(*gather, stop) : own;
      if (!learned) return {};
      return PlanningAhead::planned_from(*std::move(learned), d_model, topology, planning, rank);
    };
    std::packaged_task<PlanningAhead::Planned(const std::stop_token&)> task(std::move(plan));
    ahead->planned_ = task.get_future().share();
    ahead->thread_ = std::jthread([task = std::move(task)](const std::stop_token& stop) mutable { task(stop); });
    return ahead;
  });
}

const Plan& SequenceBalancer::finish_planning(PlanningAhead& ahead) {
  std::optional<ArgumentError> refused;
  collective([&] {
    RECORD_USER_SCOPE("knapformer::finish_planning");
    begin_step("finish_planning");
    const auto begin = Clock::now();
    if (lookout_) {
      Wait wait(*lookout_, "finish_planning");
      while (ahead.planned_.wait_for(wait.patience()) != std::future_status::ready) wait.look();
      wait.end();
    }
    PlanningAhead::Planned planned = ahead.planned_.get();
    waited_for_planning_s_ += seconds_since(begin);
    if (!planned.step && !planned.refused) {  // on all ranks alike
      Learned learned = gatherer_->finish(*ahead.gather_);
      planned = PlanningAhead::planned_from(std::move(learned), ahead.d_model_, topology_, ahead.options_, rank_);
      std::promise<PlanningAhead::Planned> again;
      again.set_value(planned);
      ahead.planned_ = again.get_future().share();
    }
    for (size_t rank = 0; rank < planned.statuses.size(); ++rank) {
      if (planned.statuses[rank] != DataStatus::kFailed) continue;
      const auto number = static_cast<int32_t>(rank);
      throw StateError(text("rank ", number, ": ", all_ ? all_->board().reason_of(number) : "its data failed"));
    }
    ahead.num_ended_ = static_cast<int32_t>(std::ranges::count(planned.statuses, DataStatus::kEnded));
    // What ranks observed is heard once, also where a plan is taken up again.
    if (ahead.heard_) planned.observed.clear();
    ahead.heard_ = true;
    take_up(std::move(planned.step), planned.observed);
    refused = std::move(planned.refused);
  });
  if (refused) throw ArgumentError(*refused);  // as in plan_routing
  return step_->plan;
}

bool SequenceBalancer::PlanningAhead::ready() const {
  return planned_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

int32_t SequenceBalancer::PlanningAhead::num_ended() const {
  if (!num_ended_) throw StateError("finish_planning: has not been called, expected before num_ended");
  return *num_ended_;
}

void SequenceBalancer::observe(double seconds) {
  static_cast<void>(step());  // throws where there is no plan to have observed
  feedback_.observe(seconds);
}

SequenceBalancer::Traffic SequenceBalancer::traffic() const {
  Traffic sum{.bytes_sent = 0, .num_collectives = 0, .waited_s = waited_for_planning_s_};
  for (const Channel* channel : {all_.get(), bag_ == all_ ? nullptr : bag_.get()}) {
    if (channel == nullptr) continue;
    const ChannelCounters& counters = channel->counters();
    sum.bytes_sent += counters.bytes_sent;
    sum.num_collectives += counters.num_collectives;
    sum.waited_s += static_cast<double>(counters.waited_ns) * 1e-9;
  }
  return sum;
}

StepMetrics SequenceBalancer::metrics() {
  const Plan& p = step().plan;
  const LoadBalance before = p.balance_before(), after = p.balance_after();
  const Traffic now = traffic();
  const LoadObserver& observer = feedback_.observer();
  return {.wir_before = before.wir(),
          .wir_after = after.wir(),
          .max_over_mean_before = before.max_over_mean(),
          .max_over_mean_after = after.max_over_mean(),
          .tokens_before = p.tokens_before()[rank_.index()],
          .tokens_after = p.tokens_after()[rank_.index()],
          .tokens_moved = p.tokens_moved(),
          .attention_tokens_moved = p.attention_tokens_moved(),
          .bytes_sent = now.bytes_sent - before_step_.bytes_sent,
          .num_collectives = now.num_collectives - before_step_.num_collectives,
          .planning_s = step_->planning_s,
          .waiting_s = now.waited_s - before_step_.waited_s,
          .gamma = p.input().workload.gamma,
          .rank_speed = p.input().speed_of(rank_),
          .given_model_error = observer.given_error(),
          .learned_model_error = observer.learned_error()};
}

}  // namespace knapformer
