// Changes steps for programs that cannot run a micro-batch on a rank without a sequence.
#pragma once

#include "knapformer/core/plan/step_plan.h"

namespace knapformer {

/// The plan, changed so that every rank has a sequence in every micro-batch. Each rank that has none gets one, of which
/// every rank keeps at least one other: a whole sequence if its bag takes one, otherwise one that a group around it
/// shares, with little work. The fullest rank holds no more tokens than before. A rank stays empty if its replica has
/// no such sequence left.
StepPlan fill_ranks(const StepPlan& plan);

}  // namespace knapformer
