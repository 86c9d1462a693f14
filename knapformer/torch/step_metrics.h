// What a training loop may log of a step.
#pragma once

#include <cstdint>

namespace knapformer {

struct StepMetrics {
  // Of the plan: work per rank without and with it, see core/metrics.h.
  double wir_before = 1, wir_after = 1;
  double max_over_mean_before = 1, max_over_mean_after = 1;
  int64_t tokens_before = 0, tokens_after = 0;  // of this rank
  int64_t tokens_moved = 0;                     // of all ranks, by one route
  double attention_tokens_moved = 0;            // of all ranks, by each exchange of an attention
  // Of this rank, since the plan.
  int64_t bytes_sent = 0;
  int64_t num_collectives = 0;
  double planning_s = 0;  // to make the plan and its tables; ahead of time where planned ahead
  /// The host waited for other ranks in this balancer's collectives. For tensors of an accelerator its stream waits
  /// and not the host: then what planning waits for alone.
  double waiting_s = 0;
  // What the plan was made with, and how well that fits what was observed: see core/load_observer.h.
  double gamma = 1;
  double rank_speed = 1;  // of this rank
  double given_model_error = 0, learned_model_error = 0;
};

}  // namespace knapformer
