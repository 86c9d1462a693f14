#include "knapformer/core/planners/whole_step/fill_ranks.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "knapformer/core/util/ragged.h"

namespace knapformer {

Plan fill_ranks(const Plan& plan) {
  const StepInput& input = plan.input();
  const PlanInput& step = input.sequences;
  const Topology& topology = step.topology;
  const int64_t max_tokens = plan.max_tokens();
  std::vector<int32_t> micro_batches = plan.micro_batches();
  std::vector<Placement> placements;
  Ragged<int64_t> chunk_lens;  // a whole sequence's is its length, wherever it goes
  std::vector<int32_t> next_id(plan.plans().size());
  for (const int32_t k : micro_batches) {
    const SequenceId id(next_id[k]++);
    placements.push_back(plan.plans()[k].placement(id));
    for (const Chunk& chunk : plan.plans()[k].chunks(id)) chunk_lens.values.push_back(chunk.num_tokens);
    chunk_lens.end_list();
  }

  struct Held {
    int32_t num_sequences = 0;
    int64_t tokens = 0;
  };
  std::vector<Held> held(static_cast<size_t>(topology.num_ranks()) * input.num_micro_batches);
  /// Whether all ranks of a place fulfil `is_so(held, tokens of the sequence's chunk)`.
  const auto all_of = [&](int32_t s, int32_t micro_batch, const Placement& place, auto is_so) {
    const size_t first = static_cast<size_t>(micro_batch) * topology.num_ranks() + place.first_rank.index();
    for (int32_t i = 0; i < place.degree; ++i) {
      if (!is_so(held[first + i], chunk_lens.of(s)[i])) return false;
    }
    return true;
  };
  const auto add = [&](int32_t s, int32_t sign) {
    Held* there =
        &held[static_cast<size_t>(micro_batches[s]) * topology.num_ranks() + placements[s].first_rank.index()];
    for (const int64_t tokens : chunk_lens.of(s)) {
      there->num_sequences += sign;
      there->tokens += sign * tokens;
      ++there;
    }
  };
  const auto is_spare = [&](int32_t s) {
    return all_of(s, micro_batches[s], placements[s],
                  [](const Held& there, int64_t) { return there.num_sequences > 1; });
  };
  std::map<std::pair<int32_t, int32_t>, std::vector<int32_t>> sequences_of;  // by replica and degree, ascending by work
  for (int32_t s = 0; s < step.seq_lens.num_sequences(); ++s) {
    add(s, +1);
    sequences_of[{placements[s].bag.value / topology.num_bags_per_replica(), placements[s].degree}].push_back(s);
  }
  for (auto& [key, sequences] : sequences_of)
    std::ranges::stable_sort(sequences, {}, [&](int32_t s) { return step.work(SequenceId(s)); });

  /// Gives the rank a sequence. Returns whether there is one. `next`: those before it are on ranks that hold no other.
  const auto fill = [&](int32_t micro_batch, Rank rank, auto& next) {
    const BagId bag = topology.bag_of(rank);
    const int32_t replica = bag.value / topology.num_bags_per_replica();
    const int32_t in_bag = rank.value - topology.bag(bag).first_rank.value;
    for (const int32_t degree : topology.shapes()[topology.bag(bag).shape].degrees) {
      const Placement place{.bag = bag, .first_rank = Rank(rank.value - in_bag % degree), .degree = degree};
      const std::vector<int32_t>& sequences = sequences_of[{replica, degree}];
      size_t& first = next[{replica, degree}];
      while (first < sequences.size() && !is_spare(sequences[first])) ++first;
      for (size_t i = first; i < sequences.size(); ++i) {
        const int32_t s = sequences[i];
        const auto has_room = [&](const Held& there, int64_t tokens) { return there.tokens + tokens <= max_tokens; };
        if (!is_spare(s) || !all_of(s, micro_batch, place, has_room)) continue;
        add(s, -1);
        micro_batches[s] = micro_batch;
        placements[s] = place;
        add(s, +1);
        return true;
      }
    }
    return false;
  };
  for (bool moved = true; moved;) {  // a sequence that moved may leave another one spare
    moved = false;
    std::map<std::pair<int32_t, int32_t>, size_t> next;
    for (size_t i = 0; i < held.size(); ++i) {
      const auto [k, rank] = std::pair(i / topology.num_ranks(), i % topology.num_ranks());
      if (held[i].num_sequences == 0) moved = fill(static_cast<int32_t>(k), Rank(rank), next) || moved;
    }
  }
  std::vector<std::string> solvers;
  for (const MicroBatchPlan& micro_batch : plan.plans()) solvers.push_back(micro_batch.solver());
  std::vector<MicroBatchPlan> plans = plans_as_placed(input, micro_batches, placements, chunk_lens.values, solvers);
  return Plan(input, std::move(micro_batches), std::move(plans));
}

}  // namespace knapformer
