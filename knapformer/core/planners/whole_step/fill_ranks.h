// Changes steps for programs that cannot run a micro-batch on a rank without a sequence.
#pragma once

#include "knapformer/core/plan/step_plan.h"

namespace knapformer {

/// The plan, changed so that every rank has a sequence in every micro-batch. Each rank that has none gets one: a whole
/// sequence with little work, from a rank that keeps at least one other. So the fullest rank holds no more tokens than
/// before. A rank stays empty if its replica has no such sequence left, or if its bag's smallest degree is above 1.
/// O(n log n).
StepPlan fill_ranks(const StepPlan& plan);

}  // namespace knapformer
