// Feedback of measured step times into later plans.
//
// A rank's measurement of a step travels with the lengths of a later step. So all ranks get the same measurements at
// the same plan, learn the same from them, and go on making the same plans.
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <vector>

#include "knapformer/core/model/load_observer.h"
#include "knapformer/core/plan/micro_batch_plan.h"
#include "knapformer/torch/comm/gather_lengths.h"

namespace knapformer {

class StepFeedback {
 public:
  StepFeedback(double gamma, std::vector<double> rank_speed, int32_t num_ranks)
      : observer_(gamma, std::move(rank_speed), num_ranks) {}

  /// Plans are of another step from now on.
  void begin_step() { ++step_; }
  /// The next observation is of this plan, and of those of its step since the last observation.
  void begin_plan(const MicroBatchPlan& plan);
  /// Throws ArgumentError where seconds are not from 1e-12 to 1e12.
  void observe(double seconds);
  /// What this rank observed since the last call, for the other ranks.
  ObservedStep take();
  /// Learns from the observations of all ranks, in rank order. Returns what is to be warned of, each thing once: that
  /// the workload model has drifted, that an observation is implausible.
  std::vector<std::string> add(std::span<const ObservedStep> observed);
  const LoadObserver& observer() const { return observer_; }

 private:
  /// The loads of a plan, kept for measurements of it that are still to come.
  struct Loads {
    int64_t step = 0, plan = 0;
    std::vector<LoadMeasurement> ranks = {};  // without seconds
  };
  /// A step has as many plans as micro-batches. With BalancedLoader a measurement arrives two steps later, and later
  /// still where more steps are planned ahead.
  static constexpr int64_t kStepsKept = 16;

  LoadObserver observer_;
  std::deque<Loads> recent_;
  int64_t step_ = 0, num_plans_ = 0, last_observed_ = 0;
  ObservedStep own_;
  bool has_drifted_ = false, has_left_out_ = false;
};

}  // namespace knapformer
