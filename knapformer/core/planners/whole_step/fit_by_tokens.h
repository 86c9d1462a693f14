// Where a step's sequences have room, by tokens alone: for limits of tokens that no packing by time keeps.
#pragma once

#include <optional>
#include <vector>

#include "knapformer/core/plan/step_plan.h"
#include "knapformer/core/planners/whole_step/micro_batch_packing.h"

namespace knapformer {

enum class FitInto {
  kSmallest,  // each sequence into the smallest group that has room, in any micro-batch
  kBags,      // each sequence over a whole bag
};

/// First fit: the longest sequences first, each into the first micro-batch with room, and there into the emptiest
/// group. A group has room if it, and each larger group around it, holds no more than its ranks' limits: then uneven
/// chunks exist with which every rank keeps the limit. Over whole bags nothing is missed that has room in an empty
/// micro-batch. Nothing if a sequence finds no room. By sequence id. O(n (micro-batches + groups)).
std::optional<std::vector<PackedSequence>> fit_by_tokens(const StepInput& input, FitInto into);

}  // namespace knapformer
