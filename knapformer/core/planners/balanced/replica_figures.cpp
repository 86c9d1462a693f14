#include "knapformer/core/planners/balanced/replica_figures.h"

#include <algorithm>
#include <utility>

#include "knapformer/core/cost/step_time.h"
#include "knapformer/core/plan/load_balance.h"

namespace knapformer {

std::vector<ReplicaFigures> figures_of(const Plan& plan) {
  const PlanInput& input = plan.input();
  const StepTime time = predict_step(plan);
  const auto num_ranks = static_cast<size_t>(plan.topology().num_ranks_per_replica());
  std::vector<ReplicaFigures> figures(time.replicas.size());
  std::vector<double> work(plan.workload_after().begin(), plan.workload_after().end());
  for (size_t r = 0; r < work.size(); ++r) work[r] /= input.speed_of(Rank(r));
  for (size_t i = 0; i < figures.size(); ++i) {
    figures[i].step_s = time.replicas[i].step_s;
    figures[i].block_s = time.replicas[i].block_s;
    figures[i].max_over_mean = LoadBalance::of(std::span(work).subspan(i * num_ranks, num_ranks)).max_over_mean();
    if (input.max_tokens_per_rank == 0) continue;
    const int64_t max_tokens = std::ranges::max(plan.tokens_after().subspan(i * num_ranks, num_ranks));
    figures[i].excess_tokens = std::max(int64_t{0}, max_tokens - input.max_tokens_per_rank);
  }
  return figures;
}

bool contains(std::span<const char> marks, bool mark) {
  return std::find(marks.begin(), marks.end(), static_cast<char>(mark)) != marks.end();
}

Plan merged(Plan plan, const Plan& other, std::span<const char> from_other) {
  if (!contains(from_other, false)) return other;
  if (!contains(from_other, true)) return plan;
  std::vector<Placement> placements;
  std::vector<int64_t> chunk_lens;
  for (int32_t s = 0; s < plan.num_sequences(); ++s) {
    const SequenceId id(s);
    const bool takes = from_other[plan.placement(id).bag.value / plan.topology().num_bags_per_replica()] != 0;
    const Plan& source = takes ? other : plan;
    placements.push_back(source.placement(id));
    for (const Chunk& chunk : source.chunks(id)) chunk_lens.push_back(chunk.num_tokens);
  }
  return Plan(plan.input(), plan.solver(), std::move(placements), std::move(chunk_lens));
}

}  // namespace knapformer
