#include "knapformer/torch/step_planner.h"

#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "knapformer/core/planners/whole_step/micro_batches.h"
#include "knapformer/core/util/process.h"

namespace knapformer {
namespace {

DataStatus status_of(const StepData& data) {
  if (data.failure) return DataStatus::kFailed;
  return data.ended ? DataStatus::kEnded : DataStatus::kActive;
}

}  // namespace

StepPlanner::StepPlanner(std::shared_ptr<Ranks> ranks)
    : ranks_(std::move(ranks)),
      feedback_(ranks_->options().plan.workload.gamma, ranks_->options().plan.rank_speed, ranks_->num_ranks()) {
  if (ranks_->all()) gatherer_ = std::make_shared<LengthGatherer>(ranks_->all());
}

Planning StepPlanner::planning_of(int64_t d_model, int32_t num_micro_batches) const {
  Planning planning{.d_model = d_model,
                    .topology = ranks_->topology(),
                    .options = ranks_->options(),
                    .rank = ranks_->rank(),
                    .first_number = ranks_->take_numbers(std::max(num_micro_batches, 1)),
                    .num_micro_batches = num_micro_batches};
  planning.options.plan.workload.gamma = feedback_.observer().gamma();
  planning.options.plan.rank_speed = feedback_.observer().rank_speed();
  return planning;
}

void StepPlanner::begin_step(std::string_view call, const Planning& planning) {
  Fingerprint fingerprint(call, planning.first_number);
  fingerprint.add("micro_batches", std::to_string(planning.num_micro_batches));
  ranks_->enter_step(fingerprint);
  feedback_.begin_step();
}

void StepPlanner::choose_topology(const GatheredLengths& lengths, Planning& planning) {
  if (ranks_->is_decided() || lengths.lengths.num_sequences() == 0) return;
  std::optional<Topology> best;
  try {
    best = Topology::parse(best_topology(planning.input(lengths), planning.options.solver, /*fewest=*/false),
                           ranks_->num_ranks());
  } catch (const ArgumentError&) {
    return;  // what is wrong with them is said where they are planned, on all ranks alike
  }
  ranks_->decide(*std::move(best));
  planning.topology = ranks_->topology();
}

Planned StepPlanner::accepted(Planned planned) {
  for (const std::string& warning : feedback_.add(planned.observed)) {
    if (ranks_->rank().value == 0) TORCH_WARN(warning);  // all ranks know
  }
  // On all ranks alike: there is nothing to tell, and nothing is in flight.
  if (planned.failed) throw StateError(*planned.failed);
  if (planned.refused) throw ArgumentError(*planned.refused);
  return planned;
}

Planned StepPlanner::plan(std::span<const int64_t> seq_lens, int64_t d_model, const StepData& data) {
  return accepted(ranks_->collective([&] {
    RECORD_USER_SCOPE("knapformer::plan_routing");
    GatheredLengths lengths = own_lengths(seq_lens, d_model, data.masks, data.work, ranks_->rank());
    lengths.observed = {feedback_.take()};
    Planning planning = planning_of(d_model, data.num_micro_batches);
    begin_step("plan_routing", planning);
    if (gatherer_) lengths = gatherer_->finish(gatherer_->start(std::move(lengths), d_model));
    choose_topology(lengths, planning);
    return planning.plan(std::move(lengths));
  }));
}

std::shared_ptr<PlanningAhead> StepPlanner::start(std::span<const int64_t> seq_lens, int64_t d_model,
                                                  const StepData& data) {
  return ranks_->collective([&] {
    RECORD_USER_SCOPE("knapformer::start_planning");
    GatheredLengths own = own_lengths(seq_lens, d_model, data.masks, data.work, ranks_->rank());
    own.statuses = {status_of(data)};
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
      ahead->max_bytes_in_flight_ = data.max_bytes_in_flight;
      own.sample_bytes = data.samples->bytes();
      fingerprint.add("max_bytes_in_flight", std::to_string(data.max_bytes_in_flight));
      for (const SampleField& field : data.samples->fields()) {
        fingerprint.add(field.name, field.per_token ? "per token" : "per sample");
      }
    }
    if (gatherer_) {
      if (data.failure) ranks_->watchdog()->leave_note(Watchdog::kFailureNote, *data.failure);
      ranks_->agree(fingerprint);
      ahead->gather_ = gatherer_->start(own, d_model);
    }
    if (!ranks_->is_decided()) {  // once: the groups of bags are made by the threads that call
      GatheredLengths lengths = gatherer_->finish(*ahead->gather_);
      choose_topology(lengths, ahead->planning_);
      ahead->planned_ = known(ahead->planning_.plan_with_tables(std::move(lengths), ranks_->devices()));
      return ahead;
    }
    // The task has copies of what it needs, so that it may outlive this planner.
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

std::shared_future<Planned> StepPlanner::known(Planned planned) {
  std::promise<Planned> promise;
  promise.set_value(std::move(planned));
  return promise.get_future().share();
}

Planned StepPlanner::await(PlanningAhead& ahead) {
  if (ranks_->all()) {
    const auto begin = std::chrono::steady_clock::now();
    ranks_->watchdog()->wait("finish_planning", [&](std::chrono::milliseconds patience) {
      return ahead.planned_.wait_for(patience) == std::future_status::ready;
    });
    ranks_->all()->counters().add_wait_since(begin);
  }
  Planned planned = ahead.planned_.get();
  if (!planned.is_known()) {  // lengths did not fit, on all ranks alike
    planned = ahead.planning_.plan(gatherer_->finish(*ahead.gather_));
    ahead.planned_ = known(planned);
  }
  ahead.num_ended_ = static_cast<int32_t>(std::ranges::count(planned.statuses, DataStatus::kEnded));
  return planned;
}

void StepPlanner::check_started(const PlanningAhead& ahead) const {
  if (ahead.thread_ != planning_thread_) throw_argument("ahead", "another balancer's", "what this one started");
}

Planned StepPlanner::finish(PlanningAhead& ahead) {
  return accepted(ranks_->collective([&] {
    RECORD_USER_SCOPE("knapformer::finish_planning");
    check_started(ahead);
    begin_step("finish_planning", ahead.planning_);
    Planned planned = await(ahead);
    if (const auto failed = std::ranges::find(planned.statuses, DataStatus::kFailed);
        failed != planned.statuses.end()) {
      const auto rank = static_cast<int32_t>(failed - planned.statuses.begin());
      const std::optional<std::string> reason =
          ranks_->watchdog() ? ranks_->watchdog()->note_of(rank, Watchdog::kFailureNote) : std::nullopt;
      planned.failed.emplace(text("rank ", rank, ": ", reason.value_or("its data failed")));
    }
    // What ranks observed is heard once, also where a plan is finished again.
    if (std::exchange(ahead.heard_, true)) planned.observed.clear();
    return planned;
  }));
}

void StepPlanner::start_moving(PlanningAhead& ahead) {
  ranks_->collective([&] {
    RECORD_USER_SCOPE("knapformer::start_moving");
    check_started(ahead);
    if (!ahead.samples_) throw_argument("ahead", "a step that was started without samples", "one with samples");
    ranks_->agree(Fingerprint("start_moving", ahead.planning_.first_number));
    const Planned planned = await(ahead);
    if (planned.refused || std::ranges::count(planned.statuses, DataStatus::kFailed) > 0) return;
    const bool pinned =
        std::ranges::any_of(ranks_->devices(), [](const TablesDevice& known) { return !known.device.is_cpu(); });
    try {
      ahead.moving_ =
          std::make_unique<SampleExchange>(ranks_->all(), ranks_->rank(), *planned.step->plan, ahead.samples_,
                                           planned.sample_bytes, ahead.max_bytes_in_flight_, pinned);
    } catch (const ArgumentError& error) {  // on all ranks alike
      ahead.too_large_ = error;
      return;
    }
    ahead.moving_->start();
  });
}

std::vector<std::vector<SampleTensors>> StepPlanner::finish_moving(PlanningAhead& ahead) {
  if (ahead.too_large_) throw ArgumentError(*ahead.too_large_);
  return ranks_->collective([&] {
    RECORD_USER_SCOPE("knapformer::finish_moving");
    check_started(ahead);
    if (!ahead.moving_) throw StateError("start_moving: has not been called, expected once before finish_moving");
    ranks_->agree(Fingerprint("finish_moving", ahead.planning_.first_number));
    return std::exchange(ahead.moving_, nullptr)->finish();
  });
}

bool PlanningAhead::ready() const { return planned_.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }

int32_t PlanningAhead::num_ended() const {
  if (!num_ended_) throw StateError("finish_planning: has not been called, expected before num_ended");
  return *num_ended_;
}

}  // namespace knapformer
