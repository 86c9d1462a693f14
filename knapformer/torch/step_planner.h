// Planning over all ranks: lengths are gathered and plans made of them, at once or on a thread while another step
// computes. Later plans follow what was learned from measured steps.
#pragma once

#include <c10/core/thread_pool.h>

#include <cstdint>
#include <future>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "knapformer/core/model/mask.h"
#include "knapformer/core/util/error.h"
#include "knapformer/torch/balancer_options.h"
#include "knapformer/torch/comm/gather_lengths.h"
#include "knapformer/torch/feedback.h"
#include "knapformer/torch/planning.h"
#include "knapformer/torch/ranks.h"
#include "knapformer/torch/sample_exchange.h"

namespace knapformer {

/// What ranks say of their sequences beside the lengths.
struct StepData {
  std::vector<Mask> masks = {};             // of each sequence, where they differ from BalancerOptions::mask; or empty
  std::vector<double> work = {};            // of each, in place of the formula's (PlanInput::give_work); or empty
  int32_t num_micro_batches = 1;            // of the step, the same on all ranks
  bool ended = false;                       // this rank's data has ended: see PlanningAhead::num_ended
  std::optional<std::string> failure = {};  // its data has failed, and why: finishing throws on all ranks
  std::shared_ptr<const Samples> samples = {};  // which move: start_moving
  int64_t max_bytes_in_flight = 0;              // of them, as in SampleExchange
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
  bool ready() const;
  /// Ranks whose data had ended. Throws StateError before start_moving or finish_planning.
  int32_t num_ended() const;

 private:
  friend class StepPlanner;
  Planning planning_;  // with what was known at the start
  bool heard_ = false;
  std::optional<LengthGatherer::Pending> gather_;  // none for one rank alone
  std::shared_future<Planned> planned_;
  std::optional<int32_t> num_ended_;
  std::shared_ptr<const Samples> samples_;
  int64_t max_bytes_in_flight_ = 0;
  std::unique_ptr<SampleExchange> moving_;
  std::optional<ArgumentError> too_large_;   // a sample
  std::shared_ptr<c10::ThreadPool> thread_;  // of the planner that started it
  std::stop_source stop_;
};

/// Methods are collective, but feedback().
class StepPlanner {
 public:
  explicit StepPlanner(std::shared_ptr<Ranks> ranks);

  /// Gathers all ranks' lengths and plans. Throws ArgumentError on all ranks where these cannot be planned.
  Planned plan(std::span<const int64_t> seq_lens, int64_t d_model, const StepData& data);
  /// The first half of plan: launches the gather of lengths and returns. The rest runs on a thread of its own.
  std::shared_ptr<PlanningAhead> start(std::span<const int64_t> seq_lens, int64_t d_model, const StepData& data);
  /// The second half. Steps that were started may be finished in any order, and again, as long as all ranks do the
  /// same.
  Planned finish(PlanningAhead& ahead);

  /// Between the two halves, where samples are given: waits for the plan, and starts to move them. What has failed is
  /// thrown by finish, so that it ends no step before.
  void start_moving(PlanningAhead& ahead);
  /// After finish, once: this rank's chunks by micro-batch. Throws ArgumentError on all ranks where a sample is larger
  /// than max_bytes_in_flight.
  std::vector<std::vector<SampleTensors>> finish_moving(PlanningAhead& ahead);

  StepFeedback& feedback() { return feedback_; }

 private:
  /// By the options, with what was learned from steps in them.
  Planning planning_of(int64_t d_model, int32_t num_micro_batches) const;
  void begin_step(std::string_view call, const Planning& planning);
  /// Where the topology is "auto", and these lengths are the first. Collective then.
  void choose_topology(const GatheredLengths& lengths, Planning& planning);
  static std::shared_future<Planned> known(Planned planned);
  /// Waits for what was started. Collective where lengths did not fit.
  Planned await(PlanningAhead& ahead);
  /// Learns from what was measured. Throws where there is no plan.
  Planned accepted(Planned planned);
  /// Throws ArgumentError where it was started by another balancer.
  void check_started(const PlanningAhead& ahead) const;

  std::shared_ptr<Ranks> ranks_;
  std::shared_ptr<LengthGatherer> gatherer_;  // null for one rank alone
  /// For what is planned ahead; null before. One thread, and not one for each task: c10d keeps about 120 bytes for
  /// every thread that has ever waited for a collective.
  std::shared_ptr<c10::ThreadPool> planning_thread_;
  StepFeedback feedback_;
};

}  // namespace knapformer
