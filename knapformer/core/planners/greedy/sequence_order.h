// The order in which planners take sequences.
#pragma once

#include <vector>

#include "knapformer/core/plan/plan.h"

namespace knapformer {

/// The sequences of a replica by descending work, ties by id.
std::vector<SequenceId> by_descending_work(const PlanInput& input, int32_t replica);

}  // namespace knapformer
