// The published planner (KnapFormer, Sec. 3.3), as its authors run it. Flat bags only.
#pragma once

#include <vector>

#include "knapformer/core/plan/plan.h"

namespace knapformer {

/// 1. Target per rank: the replica's work over its ranks. Capacity of a bag: its ranks times that.
/// 2. Take the sequences by descending work, ties by id.
/// 3. A bag is a candidate where its whole capacity is at least the sequence's work and the sequence has at least as
///    many tokens as the bag has ranks. With no candidate, the bags of the largest size are.
/// 4. Take the candidate with the lowest occupancy (assigned work over capacity), ties by size, then id.
///
/// Deviation from the paper, which says *remaining* capacity in step 3: the authors' code, and so the golden plans, use
/// the whole one. O(n log n + n (log bags + distinct bag sizes)).
///
/// `topology` is flat, and may differ from the input's, but has the same ranks.
std::vector<Placement> greedy_placements(const PlanInput& input, const Topology& topology);

/// The input must be valid.
Plan plan_greedy(PlanInput input);

}  // namespace knapformer
