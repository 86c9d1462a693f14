// Route swaps: the last part of locality. A route takes as long as its slowest rank, and what brings the most tokens
// home in all need not be best for that one. So while it helps, the slowest rank swaps what it holds, or single
// sequences, with another rank.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "knapformer/core/cost/step_time.h"
#include "knapformer/core/plan/plan.h"
#include "knapformer/core/util/winner_tree.h"

namespace knapformer {

/// The aligned groups of one degree. What two of them hold may be swapped where they are of one class.
struct Blocks {
  int32_t degree = 1;
  std::vector<int32_t> first_rank;
  std::vector<int32_t> class_of;
  std::vector<int32_t> of_rank;  // -1: none

  int32_t count() const { return static_cast<int32_t>(first_rank.size()); }
};

/// Tokens of a sequence on one of the ranks that share it, where it is cut evenly.
inline int64_t share_of(const PlanInput& input, SequenceId id, const Placement& place) {
  return input.seq_lens[id] / place.degree;
}

/// Of one replica. The placements are changed in place.
class RouteSwaps {
 public:
  RouteSwaps(const PlanInput& input, std::span<Placement> placements, int32_t replica);

  /// The slowest rank's seconds for a token's byte; then how many tokens move in all.
  std::pair<double, int64_t> figures() const;

  /// Swaps while that makes the slowest rank faster and no more than `max_moved` tokens move:
  /// 1. what two blocks of one class hold: the slowest rank's, and one that holds what is at home there or that is home
  ///    to what the slowest rank holds;
  /// 2. two whole sequences of ranks that share nothing and have the same speed: one comes home to the slowest rank.
  ///    Of such ranks the one with the most work gets no other work by it, and the others no more than that.
  /// A limit of tokens counts only where it would not be kept anyway: then such ranks get no more than it by 2.
  /// The classes go with what is swapped.
  void run(std::span<Blocks> blocks, int64_t max_moved);

 private:
  struct BlockSwap {
    int64_t tokens = 0;  // of the sequence for which it is tried
    Blocks* blocks = nullptr;
    int32_t a = 0, b = 0;
  };
  /// Of a rank.
  struct Load {
    int64_t tokens = 0;
    double work = 0;  // over its speed
    bool shares = false;
  };

  void add(int32_t sequence, int32_t sign);
  /// Moves sequences by so many ranks, as far as traffic goes.
  void shift(std::span<const int32_t> sequences, int32_t by);
  void hold(std::span<const int32_t> sequences, int32_t by);
  double seconds(const Traffic& tokens) const;
  bool swap_blocks(std::span<Blocks> blocks);
  void list(const Blocks& blocks, int32_t block, std::vector<int32_t>& sequences) const;
  void find_slowest();
  void find_held();
  void find_loads();
  bool keeps_limit() const;
  bool swap_sequences(int64_t max_tokens);
  /// Moves `in_a_` by so many ranks, and `in_b_` back, if that makes the slowest rank faster.
  bool swap(int32_t distance);

  const PlanInput& input_;
  std::span<Placement> placements_;
  int32_t num_ranks_, first_rank_;
  std::vector<Traffic> traffic_;  // tokens that each rank sends, then those that it receives
  int64_t moved_ = 0, max_moved_ = 0;
  WinnerTree slowest_{1};                   // by entry of the traffic, its seconds, negated
  std::vector<std::vector<int32_t>> held_;  // by rank: sequences of which it is the first rank
  std::vector<Load> loads_;                 // by rank; of tokens and work only where nothing is shared
  double max_work_ = 0;                     // of ranks that share nothing
  int64_t swapped_left_ = 0;                // sequences that may still be tried
  std::vector<BlockSwap> block_swaps_;
  std::vector<int32_t> in_a_, in_b_, touched_;
};

}  // namespace knapformer
