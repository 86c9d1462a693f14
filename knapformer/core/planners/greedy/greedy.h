// The published planner (KnapFormer, Sec. 3.3), as its authors run it and as their text has it. Flat bags only.
#pragma once

#include <vector>

#include "knapformer/core/plan/micro_batch_plan.h"

namespace knapformer {

/// Which capacity of a bag must be at least a sequence's work: in the authors' code, and so in the golden plans, the
/// whole one; in the paper, what the bag's sequences leave of it. In bags of one size both make the same plans.
enum class Capacity { kWhole, kRemaining };

/// 1. Target per rank: the replica's work over its ranks. Capacity of a bag: its ranks times that.
/// 2. Take the sequences by descending work, ties by id.
/// 3. A bag is a candidate where its capacity is at least the sequence's work and the sequence has at least as many
///    tokens as the bag has ranks. With no candidate, the bags of the largest size are (the paper says nothing of it).
/// 4. Take the candidate with the lowest occupancy (assigned work over capacity), ties by size, then id.
///
/// O(n log n + n (log bags + distinct bag sizes)). Of valid input, in flat bags.
std::vector<Placement> greedy_placements(const PlanInput& input, Capacity capacity = Capacity::kWhole);
MicroBatchPlan plan_greedy(PlanInput input, Capacity capacity);

}  // namespace knapformer
