// Steps for programs that cannot run a micro-batch without a sequence.
#pragma once

#include "knapformer/core/plan/step_plan.h"

namespace knapformer {

/// The plan with a sequence on every rank in every micro-batch, as a program needs that cannot run without: the whole
/// sequences with the least work move there, one to each rank without, as long as they leave others behind. So the
/// fullest rank holds no more tokens. Ranks stay empty where their replica has too few such sequences, and in flat bags
/// of several ranks. O(n log n).
StepPlan fill_ranks(const StepPlan& plan);

}  // namespace knapformer
