#include "knapformer/core/planners/whole_step/fill_ranks.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace knapformer {
namespace {

/// In one replica, whole sequences move by ascending work to ranks that have none, if another one stays behind.
void fill_replica(const StepInput& input, int32_t replica, std::vector<int32_t>& micro_batches,
                  std::vector<Placement>& placements) {
  const PlanInput& step = input.sequences;
  const int32_t num_ranks = step.topology.num_ranks_per_replica();
  const auto [first, last] = step.sequences_of(replica);
  std::vector<int32_t> num_held(static_cast<size_t>(num_ranks) * input.num_micro_batches);
  const auto held_in = [&](int32_t micro_batch, Rank rank) -> int32_t& {
    return num_held[static_cast<size_t>(micro_batch) * num_ranks + rank.value % num_ranks];
  };
  std::vector<std::pair<double, int32_t>> whole;
  for (int32_t s = first.value; s < last.value; ++s) {
    const Placement& place = placements[s];
    for (int32_t i = 0; i < place.degree; ++i) ++held_in(micro_batches[s], Rank(place.first_rank.value + i));
    if (place.degree == 1) whole.emplace_back(step.work(SequenceId(s)), s);
  }
  std::ranges::sort(whole);
  auto next = whole.begin();
  for (int32_t k = 0; k < input.num_micro_batches; ++k) {
    for (int32_t r = replica * num_ranks; r < (replica + 1) * num_ranks; ++r) {
      const BagId bag = step.topology.bag_of(Rank(r));
      const bool takes_whole = step.topology.shapes()[step.topology.bag(bag).shape].degrees.front() == 1;
      if (held_in(k, Rank(r)) > 0 || !takes_whole) continue;
      const auto is_alone = [&](const std::pair<double, int32_t>& sequence) {
        return held_in(micro_batches[sequence.second], placements[sequence.second].first_rank) == 1;
      };
      next = std::find_if_not(next, whole.end(), is_alone);
      if (next == whole.end()) return;
      const int32_t s = next++->second;
      --held_in(micro_batches[s], placements[s].first_rank);
      ++held_in(k, Rank(r));
      micro_batches[s] = k;
      placements[s] = {.bag = bag, .first_rank = Rank(r), .degree = 1};
    }
  }
}

}  // namespace

StepPlan fill_ranks(const StepPlan& plan) {
  const StepInput& input = plan.input();
  std::vector<int32_t> micro_batches(plan.micro_batches().begin(), plan.micro_batches().end());
  std::vector<Placement> placements;
  Ragged<int64_t> chunk_lens;  // a whole sequence's is its length, wherever it goes
  std::vector<int32_t> next(plan.plans().size());
  for (const int32_t k : micro_batches) {
    const Plan& micro_batch = plan.plans()[k];
    const SequenceId id(next[k]++);
    placements.push_back(micro_batch.placement(id));
    append_chunk_lens(micro_batch, id, chunk_lens);
  }
  for (int32_t r = 0; r < input.sequences.topology.num_replicas(); ++r)
    fill_replica(input, r, micro_batches, placements);
  std::vector<std::string> solvers;
  for (const Plan& micro_batch : plan.plans()) solvers.push_back(micro_batch.solver());
  std::vector<Plan> plans = plans_as_placed(input, micro_batches, placements, chunk_lens, solvers);
  return StepPlan(input, std::move(micro_batches), std::move(plans));
}

}  // namespace knapformer
