// What replicas of plans are judged by, and a plan put together of the better ones.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "knapformer/core/plan/plan.h"

namespace knapformer {

/// What a replica of a plan is judged by.
struct ReplicaFigures {
  double step_s = 0;          // predicted, the fixed time aside
  double block_s = 0;         // of it, of one block
  double max_over_mean = 1;   // work of a rank, over its speed
  int64_t excess_tokens = 0;  // of the fullest rank, beyond what it may hold

  bool keeps_limit() const { return excess_tokens == 0; }
  /// Closer to the limit; or faster, by more than what sums in another order differ in.
  bool is_better_than(const ReplicaFigures& other) const {
    if (excess_tokens != other.excess_tokens) return excess_tokens < other.excess_tokens;
    return step_s < other.step_s * (1 - 1e-12);
  }
  /// Closer to the limit; or neither less even nor slower in its blocks.
  bool is_no_worse_than(const ReplicaFigures& other) const {
    if (excess_tokens != other.excess_tokens) return excess_tokens < other.excess_tokens;
    return block_s <= other.block_s && max_over_mean <= other.max_over_mean;
  }
};

/// Of each replica.
std::vector<ReplicaFigures> figures_of(const Plan& plan);

/// Whether a replica has this mark.
bool contains(std::span<const char> marks, bool mark);

/// The plan with some replicas, those marked, from another plan of the same input.
Plan merged(Plan plan, const Plan& other, std::span<const char> from_other);

}  // namespace knapformer
