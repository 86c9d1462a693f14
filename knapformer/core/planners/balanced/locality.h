// Which of several equal sequences goes where.
#pragma once

#include <span>

#include "knapformer/core/plan/micro_batch_plan.h"

namespace knapformer {

/// Sequences of equal length and mask trade places, so that as many as possible lie on their home rank, and of the
/// others as many as possible in its node. What every rank holds and computes stays the same. So sequences that are all
/// alike stay where they are. O(n log n). Does nothing where nothing is routed.
void bring_home(const PlanInput& input, std::span<Placement> placements);

}  // namespace knapformer
