// The last steps of a planner: what is left to choose where the ranks of each sequence are decided.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "knapformer/core/plan/micro_batch_plan.h"

namespace knapformer {

/// Sequences of equal length and mask trade places, so that as many as possible lie on their home rank, and of the
/// others as many as possible in its node. What every rank holds and computes stays the same. So sequences that are all
/// alike stay where they are. O(n log n). Does nothing where nothing is routed.
void bring_home(const PlanInput& input, std::span<Placement> placements);

/// Chunk lengths for these placements, `degree` for each sequence, in sequence order. Work per token follows the chunk,
/// and attention work follows the heads, so the chunks of shared sequences can even out the other tokens that the ranks
/// of a group hold. Within every connected group of ranks the longest per-token phase is as short as whole tokens
/// allow, and no rank is above the limit of tokens if any cut of these placements keeps the limit.
std::vector<int64_t> uneven_chunk_lens(const PlanInput& input, std::span<const Placement> placements);

}  // namespace knapformer
