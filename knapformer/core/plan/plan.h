// Plan: which ranks hold which tokens of every sequence. A planner makes it once; after that it does not change.
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
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "knapformer/core/model/cluster.h"
#include "knapformer/core/model/mask.h"
#include "knapformer/core/model/topology.h"
#include "knapformer/core/model/trained_model.h"
#include "knapformer/core/model/workload.h"
#include "knapformer/core/plan/heads.h"
#include "knapformer/core/plan/lengths.h"
#include "knapformer/core/plan/load_balance.h"
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

struct PlanInput {
  SequenceLengths seq_lens = {};
  Topology topology = {};
  int64_t d_model = 0;  // width, in features
  WorkloadModel workload = {};
  /// (query, key) pairs that the mask leaves of each sequence, from 0 to l^2 (Mask::pairs). Empty: full attention.
  std::vector<int64_t> attention_pairs = {};
  /// The mask of each sequence, by which attention is computed and queries are cut. Empty: full attention everywhere,
  /// or masks of which only the pairs are known; then parts of queries are equally long, and see all keys.
  std::vector<Mask> masks = {};
  Cluster cluster = {};
  TrainedModel model = {};
  /// Per rank, relative to cluster.flops_per_s: 1e-18 to 1e18, the fastest at most 1e6 times the slowest. Empty: all 1.
  std::vector<double> rank_speed = {};
  /// The most tokens that a rank may hold. 0: no limit.
  int64_t max_tokens_per_rank = 0;
  /// Given work of each sequence, in FLOPs of one block forward, and its p (workload.h): see give_work. Empty: the
  /// formula's work.
  std::vector<double> given_work = {};
  double token_part = 1;
  /// By degree, where queries are cut (AttentionShares): see cut_queries in cost/query_cuts.h.
  std::vector<QueryCut> query_cuts = {};

  /// Sets given_work (by sequence, each from 1 / kMaxMagnitude to kMaxMagnitude), and token_part for these lengths and
  /// width. Throws ArgumentError (argument "work", or "gamma" where it is below 1e-6).
  void give_work(std::vector<double> work);

  /// Sets masks, one for each sequence or none for full attention, and their pairs. Throws ArgumentError (argument
  /// "mask") for a written mask of another length.
  void give_masks(std::vector<Mask> of_sequences);
  void give_mask(const Mask& of_all);
  /// Without sequences, and what is given for each: pairs, masks, work.
  PlanInput without_sequences() const;
  /// Appends what `from` has given for a sequence.
  void append_given(const PlanInput& from, SequenceId id);
  /// Not known: nothing.
  std::optional<Mask> mask_of(SequenceId id) const;
  /// That of every sequence, where all have the same one and it is known. Looks at each sequence.
  std::optional<Mask> common_mask() const;

  /// The work of the per-token layers, in FLOPs.
  double token_work(int64_t num_tokens) const { return token_part * workload.token_work(num_tokens, d_model); }
  /// A whole sequence's work beyond its per-token layers, in FLOPs.
  double attention_work(SequenceId id) const { return workload.attention_work_of_pairs(pairs_of(id), d_model); }
  /// (query, key) pairs that the mask leaves of the sequence.
  double mask_pairs_of(SequenceId id) const {
    const auto l = static_cast<double>(seq_lens[id]);
    return attention_pairs.empty() ? l * l : static_cast<double>(attention_pairs[id.index()]);
  }
  /// Attention work in (query, key) pairs: the pairs of the mask, or as many as make up the given work.
  double pairs_of(SequenceId id) const { return given_work.empty() ? mask_pairs_of(id) : given_pairs_of(id); }
  /// Of a whole sequence, in FLOPs.
  double work(SequenceId id) const { return given_work.empty() ? formula_work(id) : given_work[id.index()]; }
  double speed_of(Rank rank) const { return rank_speed.empty() ? 1.0 : rank_speed[rank.index()]; }
  /// The speeds of consecutive ranks.
  struct GroupSpeed {
    double sum = 0, slowest = 0;
  };
  GroupSpeed group_speed(Rank first, int32_t num_ranks) const;
  /// How attention is cut that so many ranks share.
  QueryCut query_cut(int32_t degree) const { return QueryCut::of(query_cuts, degree); }
  int32_t num_query_parts(int32_t degree) const { return query_cut(degree).num_parts; }
  AttentionShares attention_shares() const { return {model.num_heads, model.num_kv_heads, query_cuts}; }
  /// The sequences at home in a replica: [first, last).
  std::pair<SequenceId, SequenceId> sequences_of(int32_t replica) const;
  /// The same sequences by descending work, ties by id: the order in which planners take them.
  std::vector<SequenceId> by_descending_work(int32_t replica) const;

  /// Calls visit(name, value) for every member that is neither data of a step nor the topology. Ranks must share these
  /// to make equal plans, and a plan file holds them. Values are numbers, vectors of numbers, and records
  /// (util/record.h). A new member does not compile until it is named here.
  template <class Self, class Visit>
  static void for_each_setting(Self& self, Visit visit) {
    auto& [lengths, bags, width, workload_model, pairs, of_sequences, machine, trained, speed, limit, works, part,
           cuts] = self;
    visit("d_model", width);
    visit("gamma", workload_model.gamma);
    visit("cluster", machine);
    visit("model", trained);
    visit("rank_speed", speed);
    visit("max_tokens_per_rank", limit);
  }

  /// Throws ArgumentError, naming the argument.
  void validate() const;
  bool operator==(const PlanInput&) const = default;

 private:
  double formula_work(SequenceId id) const {
    return workload.token_work(seq_lens[id], d_model) + workload.attention_work_of_pairs(mask_pairs_of(id), d_model);
  }
  double given_pairs_of(SequenceId id) const;
  /// The p of this work (workload.h). Throws ArgumentError (argument "work").
  double max_token_part(std::span<const double> work) const;
};

class Plan {
 public:
  /// Chunks as even as possible: lengths differ by at most one token. The ranks of a group that hold one token more
  /// rotate from sequence to sequence within a bag, so that no rank collects the extra tokens.
  Plan(PlanInput input, std::string solver, std::vector<Placement> placements);
  /// Chunks of given lengths: `chunk_lens` holds `degree` of them for each sequence, in sequence order.
  Plan(PlanInput input, std::string solver, std::vector<Placement> placements, std::vector<int64_t> chunk_lens);

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
  std::span<const int64_t> tokens_before() const { return tokens_before_; }
  std::span<const int64_t> tokens_after() const { return tokens_after_; }

  LoadBalance balance_before() const { return LoadBalance::of(workload_before_); }
  LoadBalance balance_after() const { return LoadBalance::of(workload_after_); }
  int64_t num_tokens() const { return num_tokens_; }
  /// Tokens that lie on another rank than their home rank: one route sends them.
  int64_t tokens_moved() const { return tokens_moved_; }
  /// Tokens that leave their rank in each of the two all-to-alls of one attention: (g-1)/g of each token that g ranks
  /// share.
  double attention_tokens_moved() const { return attention_tokens_moved_; }

  /// Tokens of the fullest rank; and whether these are within the input's limit, if it has one.
  int64_t max_tokens() const { return tokens_after_.empty() ? 0 : std::ranges::max(tokens_after_); }
  bool keeps_limit() const { return input_.max_tokens_per_rank == 0 || max_tokens() <= input_.max_tokens_per_rank; }

  /// Checks every promise above from the parts alone: each token of each sequence is on exactly one rank, groups are
  /// aligned and inside their bag and replica, order, sums. Throws StateError with the first promise that is broken.
  void validate() const;

  bool operator==(const Plan&) const = default;

 private:
  void lay_out(std::span<const int64_t> chunk_lens);

  PlanInput input_;
  std::string solver_;
  std::vector<Placement> placements_;
  Ragged<Chunk> chunks_;         // by sequence
  Ragged<int32_t> rank_chunks_;  // by rank, as indices
  std::vector<double> workload_before_, workload_after_;
  std::vector<int64_t> tokens_before_, tokens_after_;
  int64_t num_tokens_ = 0;
  int64_t tokens_moved_ = 0;
  double attention_tokens_moved_ = 0;
};

/// Every sequence on its home rank, whole: the step without a balancer. Its route is empty.
Plan plan_home(const PlanInput& input);
/// Every sequence in its home rank's bag, shared by all ranks of it: static sequence parallelism. Throws ArgumentError
/// where bags are nested.
Plan plan_home_bags(const PlanInput& input);

}  // namespace knapformer
