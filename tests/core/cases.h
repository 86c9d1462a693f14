// Generated cases for the tests of the core: random lengths, topologies and placements from one seed.
#pragma once

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "knapformer/core/cost/bounds.h"
#include "knapformer/core/cost/step_time.h"
#include "knapformer/core/planners/planner.h"

namespace knapformer {

inline Placement at(int32_t bag, int32_t first_rank, int32_t degree) {
  return {.bag = BagId(bag), .first_rank = Rank(first_rank), .degree = degree};
}
/// Lengths by rank, with everything else as by default.
inline PlanInput lengths_in(const std::vector<std::vector<int64_t>>& lens, std::string_view topology, int64_t d_model) {
  return {.seq_lens = SequenceLengths::from_lists(lens),
          .topology = Topology::parse(topology, std::ssize(lens)),
          .d_model = d_model,
          .workload = {}};
}
inline MicroBatchPlan greedy(PlanInput input) { return plan_micro_batch(std::move(input), "greedy"); }
inline MicroBatchPlan balanced(PlanInput input, Effort effort = {}) {
  return plan_micro_batch(std::move(input), "balanced", effort);
}

/// Predicted seconds.
inline double step_s(const MicroBatchPlan& plan) { return predict_micro_batch(plan).total_s(); }
/// Of a block, in the replica where it takes the longest.
inline double max_block_s(const MicroBatchPlan& plan) {
  const MicroBatchTime time = predict_micro_batch(plan);
  return std::ranges::max(time.replica_block_s);
}
/// Of the blocks alone, over the work divided evenly.
inline double block_loss(const MicroBatchPlan& plan) {
  const MicroBatchTime time = predict_micro_batch(plan);
  return time.ideal_s > 0 ? time.blocks_s() / time.ideal_s : 1;
}

class Cases {
 public:
  explicit Cases(uint64_t seed) : random_(seed) {}

  int64_t integer(int64_t min, int64_t max) { return std::uniform_int_distribution<int64_t>(min, max)(random_); }

  /// A flat or nested topology of at most 8 ranks a bag.
  std::string topology(bool nested) {
    const std::vector<std::string> flat = {"1", "2", "3", "4", "5", "8"};
    const std::vector<std::string> deep = {"2/1", "4/2/1", "4/1", "8/4/2/1", "6/3/1", "6/2", "1", "3"};
    std::string text;
    const int64_t terms = integer(1, 3);
    for (int64_t i = 0; i < terms; ++i) {
      const auto& pool = nested ? deep : flat;
      if (i > 0) text += '+';
      text += 'g' + pool[integer(0, static_cast<int64_t>(pool.size()) - 1)] + 'n' + std::to_string(integer(1, 3));
    }
    return text;
  }

  /// Lengths over `num_ranks` ranks: some ranks without any, some sequences of a token or two.
  SequenceLengths lengths(int32_t num_ranks, int64_t max_len = 60) {
    std::vector<std::vector<int64_t>> lists(static_cast<size_t>(num_ranks));
    for (auto& list : lists) {
      const int64_t count = integer(0, 3) == 0 ? 0 : integer(0, 6);
      for (int64_t i = 0; i < count; ++i) list.push_back(integer(0, 3) == 0 ? integer(1, 3) : integer(1, max_len));
    }
    return SequenceLengths::from_lists(lists);
  }

  PlanInput input(bool nested, int64_t max_len = 60) {
    const std::string text = topology(nested);
    const Topology topology = Topology::parse(text, Topology::parse(text).num_ranks() * integer(1, 3));
    return {.seq_lens = lengths(topology.num_ranks(), max_len),
            .topology = topology,
            .d_model = integer(1, 64),
            .workload = {},
            .cluster = {.fixed_s = 0},  // with these lengths all else would be small beside it
            .model = {.num_parameters = 0}};
  }

  Mask mask(int64_t seq_len) {
    const char* const masks[] = {"full", "causal", "prefix:7", "block_causal:3:5", "window:4:9"};
    const int64_t kind = integer(0, seq_len < 4 ? 4 : 6);
    if (kind < 5) return Mask::parse(masks[kind]);
    const int64_t first = integer(1, seq_len - 2);
    return Mask::parse(kind == 5 ? text("c", first, "@1 f", seq_len - first)
                                 : text("ranges:", first, "=0-", first, ";", seq_len - first, "=0-1+"));
  }

  /// Cuts the queries of each degree in some way, and gives all sequences a mask, or each its own.
  void cut_attention(PlanInput& input) {
    std::vector<Mask> masks;
    const bool is_mixed = integer(0, 1) == 1;
    for (const int64_t length : input.seq_lens.lens())
      masks.push_back(masks.empty() || is_mixed || masks[0].written ? mask(length) : masks[0]);
    input.give_masks(std::move(masks));
    for (int32_t degree = 2; degree <= 8; ++degree) {
      auto parts = static_cast<int32_t>(integer(1, degree));
      while (degree % parts != 0) --parts;
      const bool may_stage = parts > 1 && input.masks.empty();
      input.attention_cuts.push_back(
          {.degree = degree, .num_parts = parts, .num_stages = may_stage ? static_cast<int32_t>(integer(1, 3)) : 1});
    }
  }

  /// Of each rank, 0.5 to 2.
  std::vector<double> rank_speed(int32_t num_ranks) {
    std::vector<double> speeds(static_cast<size_t>(num_ranks));
    for (double& speed : speeds) speed = static_cast<double>(integer(1, 4)) / 2;
    return speeds;
  }

  /// Any valid plan at all: random aligned groups, and chunks cut at random places.
  MicroBatchPlan any_plan(PlanInput input) {
    std::vector<Placement> placements;
    std::vector<int64_t> chunk_lens;
    const Topology& topology = input.topology;
    for (int32_t s = 0; s < input.seq_lens.num_sequences(); ++s) {
      const int32_t replica = input.seq_lens.home_of(SequenceId(s)).value / topology.num_ranks_per_replica();
      const BagId bag(replica * topology.num_bags_per_replica() +
                      static_cast<int32_t>(integer(0, topology.num_bags_per_replica() - 1)));
      const Bag& chosen = topology.bag(bag);
      const auto& degrees = topology.shapes()[chosen.shape].degrees;
      const int32_t degree = degrees[integer(0, static_cast<int64_t>(degrees.size()) - 1)];
      const auto group = static_cast<int32_t>(integer(0, chosen.num_ranks / degree - 1));
      placements.push_back(
          {.bag = bag, .first_rank = Rank(chosen.first_rank.value + group * degree), .degree = degree});
      std::vector<int64_t> cuts = {0, input.seq_lens[SequenceId(s)]};
      for (int32_t i = 1; i < degree; ++i) cuts.push_back(integer(0, input.seq_lens[SequenceId(s)]));
      std::sort(cuts.begin(), cuts.end());
      for (size_t i = 0; i + 1 < cuts.size(); ++i) chunk_lens.push_back(cuts[i + 1] - cuts[i]);
    }
    return MicroBatchPlan(std::move(input), "any", std::move(placements), std::move(chunk_lens));
  }

  /// Sequences in random micro-batches, each of any valid plan.
  Plan any_step(const StepInput& input) {
    std::vector<int32_t> micro_batches;
    for (int32_t s = 0; s < input.sequences.seq_lens.num_sequences(); ++s)
      micro_batches.push_back(static_cast<int32_t>(integer(0, input.num_micro_batches - 1)));
    std::vector<MicroBatchPlan> plans;
    for (PlanInput& part : micro_batch_inputs(input, micro_batches)) plans.push_back(any_plan(std::move(part)));
    return Plan(input, std::move(micro_batches), std::move(plans));
  }

 private:
  std::mt19937_64 random_;
};

}  // namespace knapformer
