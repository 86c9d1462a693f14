// MicroBatchPlan: which ranks hold which tokens of every sequence. A planner makes it once; after that it does not
// change.
//
// Where the tokens lie. A sequence is shared by a group of `degree` consecutive ranks of one bag, in contiguous chunks,
// one for each rank of the group in rank order (a chunk may be empty: if the sequence has fewer tokens than ranks, or
// if its chunks are uneven). A rank orders its chunks by (degree, sequence id): so the sequences of one degree are
// contiguous rows, and in a flat bag the order is sequence order. Plan files, tables and attention follow this order.
//
//   sequence 7, 10 tokens, degree 4, group at rank 8:   rank 8 [0,3)  rank 9 [3,6)  rank 10 [6,8)  rank 11 [8,10)
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "knapformer/core/plan/load_balance.h"
#include "knapformer/core/plan/plan_input.h"
#include "knapformer/core/util/ids.h"
#include "knapformer/core/util/ragged.h"

namespace knapformer {

/// Part of a sequence on one rank.
struct Chunk {
  SequenceId sequence;
  Rank rank;
  int64_t first_token = 0;
  int64_t num_tokens = 0;

  bool operator==(const Chunk&) const = default;
};

/// Where one sequence goes: to `degree` consecutive ranks of `bag`, from `first_rank` on.
struct Placement {
  BagId bag;
  Rank first_rank;
  int32_t degree = 1;

  bool operator==(const Placement&) const = default;
};

class MicroBatchPlan {
 public:
  /// Chunks as even as possible: lengths differ by at most one token. The ranks of a group that hold one token more
  /// rotate from sequence to sequence within a bag, so that no rank collects the extra tokens.
  MicroBatchPlan(PlanInput input, std::string solver, std::vector<Placement> placements);
  /// Chunks of given lengths: `chunk_lens` holds `degree` of them for each sequence, in sequence order.
  MicroBatchPlan(PlanInput input, std::string solver, std::vector<Placement> placements,
                 std::vector<int64_t> chunk_lens);

  const PlanInput& input() const { return input_; }
  const SequenceLengths& seq_lens() const { return input_.seq_lens; }
  const Topology& topology() const { return input_.topology; }
  const std::string& solver() const { return solver_; }
  int32_t num_ranks() const { return input_.seq_lens.num_ranks(); }
  int32_t num_sequences() const { return input_.seq_lens.num_sequences(); }

  std::span<const Placement> placements() const { return placements_; }
  const Placement& placement(SequenceId id) const { return placements_[id.index()]; }
  /// The parts of a sequence's queries that the ranks of its group share, in rank order; one where only heads are cut.
  std::vector<QueryPart> query_parts(SequenceId id) const;
  /// The chunks of a sequence, in token order, which is rank order.
  std::span<const Chunk> chunks(SequenceId id) const { return chunks_.of(id.value); }
  /// All chunks, in sequence order.
  std::span<const Chunk> chunks() const { return chunks_.values; }
  /// The tokens of all chunks, in the same order.
  std::vector<int64_t> chunk_lens() const;
  /// The chunks that a rank holds, as indices into chunks(), in the order of its rows.
  std::span<const int32_t> chunks_on(Rank rank) const { return rank_chunks_.of(rank.value); }
  const Chunk& chunk(int32_t index) const { return chunks_.values[index]; }
  int32_t degree_of(const Chunk& chunk) const { return placement(chunk.sequence).degree; }

  /// Per rank, without and with the plan: FLOPs of one block, forward, as in workload.h.
  std::span<const double> workload_before() const { return workload_before_; }
  std::span<const double> workload_after() const { return workload_after_; }
  /// Per rank, with the plan: the (query, key) pairs of its share of attention.
  std::span<const double> pairs_after() const { return pairs_after_; }
  std::span<const int64_t> tokens_before() const { return tokens_before_; }
  std::span<const int64_t> tokens_after() const { return tokens_after_; }

  LoadBalance balance_before() const { return LoadBalance::of(workload_before_); }
  LoadBalance balance_after() const { return LoadBalance::of(workload_after_); }
  int64_t num_tokens() const { return num_tokens_; }
  /// Tokens that lie on another rank than their home rank: one route sends them.
  int64_t tokens_moved() const { return tokens_moved_; }
  /// (g-1)/g of each token that g ranks share: where heads alone are cut, what each of the two all-to-alls of an
  /// attention moves.
  double attention_tokens_moved() const { return attention_tokens_moved_; }

  /// Tokens of the fullest rank; and whether these are within the input's limit, if it has one.
  int64_t max_tokens() const { return tokens_after_.empty() ? 0 : std::ranges::max(tokens_after_); }
  bool keeps_limit() const { return input_.max_tokens_per_rank == 0 || max_tokens() <= input_.max_tokens_per_rank; }

  /// Checks every promise above from the parts alone: each token of each sequence is on exactly one rank, groups are
  /// aligned and inside their bag and replica, order, sums. Throws StateError with the first promise that is broken.
  void validate() const;

  bool operator==(const MicroBatchPlan&) const = default;

 private:
  void lay_out(std::span<const int64_t> chunk_lens);

  PlanInput input_;
  std::string solver_;
  std::vector<Placement> placements_;
  Ragged<Chunk> chunks_;         // by sequence
  Ragged<int32_t> rank_chunks_;  // by rank, as indices
  std::vector<double> workload_before_, workload_after_, pairs_after_;
  std::vector<int64_t> tokens_before_, tokens_after_;
  int64_t num_tokens_ = 0;
  int64_t tokens_moved_ = 0;
  double attention_tokens_moved_ = 0;
};

/// Every sequence on its home rank, whole: the step without a balancer. Its route is empty.
MicroBatchPlan plan_home(const PlanInput& input);
/// Every sequence in its home rank's bag, shared by all ranks of it: static sequence parallelism. Throws ArgumentError
/// where bags are nested.
MicroBatchPlan plan_home_bags(const PlanInput& input);

}  // namespace knapformer
