// Limits of tokens that a rank may hold: the default of a step, the least that a plan could keep, and errors of others.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

#include "knapformer/core/plan/plan.h"
#include "knapformer/core/util/error.h"

namespace knapformer {

/// No plan that was found keeps max_tokens_per_rank.
class TokenLimitError : public ArgumentError {
 public:
  using ArgumentError::ArgumentError;
};

/// Of the replica that has the most.
int64_t tokens_of_fullest_replica(const PlanInput& input);
/// Tokens that each rank of a largest bag holds of the longest sequence.
int64_t share_of_longest(const PlanInput& input);
/// No plan in so many micro-batches keeps less than this.
int64_t least_token_limit(const PlanInput& input, int32_t num_micro_batches);
/// Throws TokenLimitError, for an input whose limit is below the least.
[[noreturn]] void refuse_below_least(const PlanInput& input, int32_t num_micro_batches);
/// The same, for a plan that does not keep its limit. The error names a limit that `planner`, which made it, keeps.
[[noreturn]] void refuse_unkept(const MicroBatchPlan& plan, const std::function<MicroBatchPlan(PlanInput)>& planner);
/// The same, for a step of several micro-batches of which no plan was found that keeps it.
[[noreturn]] void refuse_step(const StepInput& input, std::string_view solver);

/// The limit of a step that is given none: half more than the fullest rank holds in the given order.
int64_t default_token_limit(const StepInput& input);

}  // namespace knapformer
