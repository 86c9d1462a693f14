// The planner of a whole optimizer step: it decides which micro-batch computes each sequence, and on which ranks.
//
//   1. lower bound        cost/bounds.h: that of one micro-batch with all sequences
//   2. pack               levels.h: over all micro-batches at once, under the best of many levels. With
//                         StepSync::kStep the ranks' sums are balanced, as if there were one micro-batch, and then cut
//   3. plan               a micro-batch that is not even enough, by the named planner
//   4. compare            with the given order, each micro-batch planned by itself, and with one micro-batch of all
//   5. fit                if nothing so far keeps the limit of tokens: packing.h, by tokens; then the given order at
//                         home; then each sequence in its own micro-batch
//
// By construction the step is predicted to take no longer than the given micro-batches (micro_batches_as_given),
// planned by the same planner with the same limit and effort; of more than 4,096 sequences, at low effort and at most
// 0.1 % longer. Among steps that take about equally long, the one with the lowest levels is taken, which hold the
// fewest tokens.
#pragma once

#include <string_view>

#include "knapformer/core/plan/plan.h"
#include "knapformer/core/planners/balanced/effort.h"

namespace knapformer {

/// The input of the plan has the limit of tokens that was taken. Throws ArgumentError for an unknown name, invalid
/// input, or a limit of tokens per rank that no plan that was found keeps.
Plan plan_step(StepInput input, std::string_view solver, Effort effort = {});

/// Uses as few micro-batches as keep max_tokens_per_rank; the input's number is ignored. Throws ArgumentError (argument
/// "micro_batches") if there is no limit, and otherwise as plan_step does.
Plan plan_fewest_micro_batches(StepInput input, std::string_view solver, Effort effort = {});

}  // namespace knapformer
