// PlanInput: all that a planner decides by.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "knapformer/core/model/cluster.h"
#include "knapformer/core/model/mask.h"
#include "knapformer/core/model/topology.h"
#include "knapformer/core/model/trained_model.h"
#include "knapformer/core/model/workload.h"
#include "knapformer/core/plan/attention_shares.h"
#include "knapformer/core/plan/lengths.h"
#include "knapformer/core/util/ids.h"

namespace knapformer {

struct PlanInput {
  SequenceLengths seq_lens = {};
  Topology topology = {};
  int64_t d_model = 0;  // width, in features
  WorkloadModel workload = {};
  /// The (query, key) pairs and the mask of each sequence (give_masks). Empty: full attention.
  std::vector<int64_t> attention_pairs = {};
  std::vector<Mask> masks = {};
  Cluster cluster = {};
  TrainedModel model = {};
  /// Per rank, relative to cluster.flops_per_s: 1e-18 to 1e18, the fastest at most 1e6 times the slowest. Empty: all 1.
  std::vector<double> rank_speed = {};
  /// The most tokens that a rank may hold. 0: no limit.
  int64_t max_tokens_per_rank = 0;
  /// Given work of each sequence, in FLOPs of one block forward, and its p (given_work.cpp). Empty: the formula's.
  std::vector<double> given_work = {};
  double token_part = 1;
  /// By degree, where queries are cut (AttentionShares): see cut_attention in planners/attention_cuts_and_stages.h.
  std::vector<AttentionCut> attention_cuts = {};

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
  Mask mask_of(SequenceId id) const { return masks.empty() ? Mask() : masks[id.index()]; }
  /// That of every sequence, where all have the same one. Looks at each sequence.
  std::optional<Mask> common_mask() const;

  /// The work of the per-token layers, in FLOPs.
  double token_work(int64_t num_tokens) const { return token_part * workload.token_work(num_tokens, d_model); }
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
  AttentionCut attention_cut(int32_t degree) const { return AttentionCut::of(attention_cuts, degree); }
  /// Keys may travel in stages where parts of the queries see all of them.
  int32_t max_stages(int32_t num_parts) const {
    return num_parts > 1 && attention_pairs.empty() ? AttentionCut::kMaxStages : 1;
  }
  AttentionShares attention_shares() const { return {model.num_heads, model.num_kv_heads, attention_cuts}; }
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
  /// The p of this work (given_work.cpp). Throws ArgumentError (argument "work").
  double max_token_part(std::span<const double> work) const;
};

}  // namespace knapformer
