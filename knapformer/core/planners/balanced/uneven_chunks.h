// Where shared sequences are cut.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "knapformer/core/plan/micro_batch_plan.h"

namespace knapformer {

/// Chunk lengths for these placements, `degree` for each sequence, in sequence order. Work per token follows the chunk,
/// and attention work follows the heads, so the chunks of shared sequences can even out the other tokens that the ranks
/// of a group hold. Within every connected group of ranks the longest per-token phase is as short as whole tokens
/// allow, and no rank is above the limit of tokens if any cut of these placements keeps the limit.
std::vector<int64_t> uneven_chunk_lens(const PlanInput& input, std::span<const Placement> placements);

}  // namespace knapformer
