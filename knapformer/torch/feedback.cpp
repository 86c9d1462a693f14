#include "knapformer/torch/feedback.h"

#include <cmath>
#include <utility>

#include "knapformer/core/util/error.h"

namespace knapformer {

void StepFeedback::begin_plan(const MicroBatchPlan& plan) {
  ++num_plans_;
  const bool is_formula = plan.input().given_work.empty();
  Loads& loads = recent_.emplace_back(Loads{.step = step_, .plan = num_plans_});
  for (size_t r = 0; r < plan.workload_after().size(); ++r) {
    // Given work says nothing of gamma: as work of tokens alone it leaves gamma as given.
    const double tokens = plan.input().token_work(plan.tokens_after()[r]);
    const double pairs = WorkloadModel{.gamma = 1}.attention_work_of_pairs(plan.pairs_after()[r], plan.input().d_model);
    loads.ranks.push_back({.rank = static_cast<int32_t>(r),
                           .token_work = is_formula ? tokens : plan.workload_after()[r],
                           .attention_work = is_formula ? pairs : 0});
  }
  while (recent_.front().step <= step_ - kStepsKept) recent_.pop_front();
}

void StepFeedback::observe(double seconds) {
  check_range("seconds", seconds, 1e-12, 1e12);
  // The micro-batches of this step that were followed since the last observation.
  int64_t first = num_plans_;
  for (auto loads = recent_.rbegin(); loads != recent_.rend() && loads->step == step_; ++loads) {
    if (loads->plan > last_observed_) first = loads->plan;
  }
  const bool goes_on = own_.last_plan > 0 && own_.last_plan + 1 == first;
  own_ = {.first_plan = goes_on ? own_.first_plan : first,
          .last_plan = num_plans_,
          .seconds = seconds + (goes_on ? own_.seconds : 0)};
  last_observed_ = num_plans_;
}

ObservedStep StepFeedback::take() { return std::exchange(own_, {}); }

std::vector<std::string> StepFeedback::add(std::span<const ObservedStep> observed) {
  std::vector<LoadMeasurement> measured;
  for (size_t r = 0; r < observed.size(); ++r) {
    const auto& [first, last, seconds] = observed[r];
    // Nothing was measured, or a plan is no longer kept.
    if (first == 0 || recent_.empty() || first < recent_.front().plan || last > recent_.back().plan) continue;
    LoadMeasurement of_rank{.rank = static_cast<int32_t>(r), .token_work = 0, .attention_work = 0, .seconds = seconds};
    for (int64_t plan = first; plan <= last; ++plan) {
      const LoadMeasurement& load = recent_[static_cast<size_t>(plan - recent_.front().plan)].ranks[r];  // without gaps
      of_rank.token_work += load.token_work;
      of_rank.attention_work += load.attention_work;
    }
    measured.push_back(of_rank);
  }
  std::vector<std::string> warnings;
  const std::optional<LoadMeasurement> left_out = observer_.add(measured);
  if (left_out && !std::exchange(has_left_out_, true)) {
    warnings.push_back(text("knapformer: observe: got ", left_out->seconds, " on rank ", left_out->rank,
                            ", expected seconds: by those of the other ranks and of the last steps, this is more than ",
                            LoadObserver::kPlausible, " times off. Such times are left out."));
  }
  if (observer_.drifted() && !std::exchange(has_drifted_, true)) {
    const auto percent = [](double error) { return std::lround(100 * error); };
    warnings.push_back(
        text("knapformer: the workload model that the balancer was given misses the observed step "
             "times by ",
             percent(observer_.given_error()), "%; with gamma ", observer_.gamma(),
             observer_.rank_speed().empty() ? "" : " and ranks of unequal speed", ", learned from them, by ",
             percent(observer_.learned_error()), "%. Plans follow what was learned."));
  }
  return warnings;
}

}  // namespace knapformer
