// The planner of a whole optimizer step: which micro-batch computes each sequence, and on which ranks.
//
//   1. lower bound        cost/accumulation.h: that of one micro-batch with all sequences
//   2. pack               micro_batch_packing.h: whole sequences, over all micro-batches at once, for a few sets of
//                         levels; with StepSync::kStep the ranks' sums are balanced, and then cut into micro-batches
//   3. plan               a micro-batch that needs sharing, or is not even enough, by the planner of that name
//   4. compare            with all sequences in one micro-batch, where sequences must be shared; and with the given
//                         order, each micro-batch planned by itself
//
// By construction the step is predicted to take no longer than the micro-batches as they are given
// (micro_batches_as_given), planned by the same planner with the same effort; with more than 4,096 sequences, at low
// effort. Planning these stops once it is proven that they take longer. They are not planned at all where more than
// 4,096 sequences stay whole and the step is, route aside, within 0.04 % of the lower bound (0.1 % at low effort): they
// could be shorter by no more than that.
//
// Without a limit of tokens time alone decides; among steps that take about equally long, the one with the lowest
// levels, which hold the fewest tokens. Fewer and longer micro-batches are faster and need more memory: state what
// memory allows as max_tokens_per_rank.
#pragma once

#include <string_view>

#include "knapformer/core/plan/step_plan.h"
#include "knapformer/core/planners/balanced/effort.h"

namespace knapformer {

/// Throws ArgumentError for an unknown name, invalid input, or a limit of tokens per rank that no plan found keeps.
StepPlan plan_step(StepInput input, std::string_view solver, Effort effort = {});

/// With as few micro-batches as keep max_tokens_per_rank; the input's number is ignored. Throws ArgumentError (argument
/// "micro_batches") where there is no limit, and as plan_step does.
StepPlan plan_fewest_micro_batches(StepInput input, std::string_view solver, Effort effort = {});

}  // namespace knapformer
