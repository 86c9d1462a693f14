// From measured step times to the next plans, alike on all ranks.
//
// What a rank observed of a step travels with the lengths of a later one. All ranks hear the same from all ranks at the
// same plan, so that all learn the same and go on planning alike.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "knapformer/core/load_observer.h"
#include "knapformer/core/plan.h"
#include "knapformer/torch/learn_lengths.h"

namespace knapformer {

struct BalancerOptions;

class StepFeedback {
 public:
  StepFeedback() = default;
  StepFeedback(double gamma, std::vector<double> rank_speed, int32_t num_ranks)
      : observer_(gamma, std::move(rank_speed), num_ranks) {}

  /// A plan is taken up: what is observed from now on is of it.
  void begin_plan(const Plan& plan);
  /// Throws ArgumentError where seconds are not positive and finite.
  void observe(double seconds);
  /// What this rank has to tell, once.
  ObservedStep take();
  /// What all ranks told, in rank order. True where it shows for the first time that the workload model has drifted.
  bool add(std::span<const ObservedStep> observed);
  /// The options with what was learned in them.
  BalancerOptions refined(const BalancerOptions& given) const;

  const LoadObserver& observer() const { return observer_; }
  std::string drift_message() const;

 private:
  /// The loads of a plan that some rank may still tell of.
  struct Loads {
    int64_t plan = 0;
    std::vector<double> token_work, attention_work;  // per rank; attention at gamma = 1
  };
  static constexpr size_t kPlansKept = 8;

  LoadObserver observer_{1.0, {}, 1};
  std::deque<Loads> recent_;
  int64_t num_plans_ = 0;
  ObservedStep own_;
  bool has_drifted_ = false;
};

}  // namespace knapformer
