#include "knapformer/core/planners/whole_step/topology_choice.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <tuple>

#include "knapformer/core/cost/step_time.h"
#include "knapformer/core/planners/planner.h"
#include "knapformer/core/planners/token_limits.h"
#include "knapformer/core/planners/whole_step/packing.h"
#include "knapformer/core/util/error.h"

namespace knapformer {
namespace {

/// Relative: options whose times differ by less count as equally fast.
constexpr double kEqualTime = 1e-3;

struct Candidate {
  TopologyOption option;
  int32_t bag_ranks = 1;
  bool nested = false;
  int32_t max_degree = 1;         // of the sequences of any plan
  double exchanged_fraction = 0;  // of the tokens, by attention; mean over the batches
};

/// The most ranks that a bag may need: twice a node, and twice what the longest sequence takes in an even step and
/// under the limit of tokens.
int64_t max_bag_ranks(std::span<const PlanInput> batches, int32_t node) {
  double most = 2.0 * node;
  for (const PlanInput& batch : batches) {
    const BlockRates rates(batch);
    double total_s = 0, longest_s = 0;
    for (SequenceId id(0); id.value < batch.seq_lens.num_sequences(); ++id.value) {
      total_s += rates.work_s(batch, id);
      longest_s = std::max(longest_s, rates.work_s(batch, id));
      if (batch.max_tokens_per_rank > 0)
        most = std::max(most, 2.0 * static_cast<double>(batch.seq_lens[id] / batch.max_tokens_per_rank));
    }
    if (total_s > 0) most = std::max(most, 2 * longest_s / total_s * batch.seq_lens.num_ranks());
  }
  return static_cast<int64_t>(most);
}

std::vector<Candidate> candidates(int32_t num_ranks, int32_t ranks_per_node, int64_t max_size, bool may_nest) {
  const int32_t node = std::min(ranks_per_node, num_ranks);
  std::vector<Candidate> out;
  for (int32_t size = 1; size <= std::min(max_size, int64_t{num_ranks}); ++size) {
    const bool tiles_nodes = node % size == 0 || size % node == 0 || size == num_ranks;
    if (num_ranks % size != 0 || !tiles_nodes) continue;
    out.push_back({.option = {.topology = text('g', size, 'n', num_ranks / size)}, .bag_ranks = size});
    if (size == 1 || !may_nest) continue;
    const std::string nested = Topology::nested(size, num_ranks / size).str();
    out.push_back({.option = {.topology = nested}, .bag_ranks = size, .nested = true});
  }
  return out;
}

/// Plans all batches with the candidate's topology, and fills in what its plans are predicted to do.
void predict(Candidate& candidate, std::span<const PlanInput> batches, std::string_view solver) {
  TopologyOption& option = candidate.option;
  const double weight = 1.0 / static_cast<double>(batches.size());
  for (const PlanInput& batch : batches) {
    PlanInput input = batch;
    input.topology = Topology::parse(option.topology, batch.seq_lens.num_ranks());
    input.validate();
    const MicroBatchPlan plan = plan_micro_batch(std::move(input), solver);
    const MicroBatchTime time = predict_micro_batch(plan);
    option.predicted_time_s += weight * time.total_s();
    for (const Placement& place : plan.placements())
      candidate.max_degree = std::max(candidate.max_degree, place.degree);
    option.over_ideal += weight * time.over_ideal();
    if (plan.num_tokens() > 0)
      candidate.exchanged_fraction += weight * plan.attention_tokens_moved() / static_cast<double>(plan.num_tokens());
  }
}

}  // namespace

std::vector<TopologyOption> rank_topologies(std::span<const PlanInput> batches, std::string_view solver) {
  if (batches.empty()) throw_argument("batches", "none", "at least one batch of lengths");
  const int32_t num_ranks = batches.front().seq_lens.num_ranks();
  if (num_ranks < 1) throw_argument("batches", "no ranks", "lengths for at least one rank");
  const bool may_nest = planner_named(solver).plans_nested_bags;
  const Cluster& cluster = batches.front().cluster;
  cluster.validate();
  for (const PlanInput& batch : batches) {
    if (batch.seq_lens.num_ranks() != num_ranks) {
      throw_argument("batches", text("lengths for ", batch.seq_lens.num_ranks(), " ranks beside ", num_ranks),
                     "batches for one number of ranks");
    }
    if (batch.cluster != cluster) throw_argument("batches", "several clusters", "one for all");
  }

  const int64_t max_size = max_bag_ranks(batches, std::min(cluster.ranks_per_node, num_ranks));
  std::vector<Candidate> ranked = candidates(num_ranks, cluster.ranks_per_node, max_size, may_nest);
  for (Candidate& candidate : ranked) {
    try {
      predict(candidate, batches, solver);
    } catch (const TokenLimitError&) {
      candidate.exchanged_fraction = 0;
      candidate.option = {
          .topology = candidate.option.topology, .predicted_time_s = kInfinity, .over_ideal = kInfinity};
    }
  }
  // Nested bags of several nodes whose sequences all stay inside a node are those of the nodes.
  std::erase_if(ranked, [&](const Candidate& of) {
    return of.nested && of.bag_ranks > cluster.ranks_per_node && of.max_degree <= cluster.ranks_per_node &&
           !std::isinf(of.option.predicted_time_s);
  });
  double best_s = kInfinity;
  for (const Candidate& candidate : ranked) best_s = std::min(best_s, candidate.option.predicted_time_s);
  const auto order = [&](const Candidate& candidate) {
    const TopologyOption& option = candidate.option;
    // Of the topologies that cannot keep the limit, the one that comes closest is first: large bags share the most.
    const int32_t sign = std::isinf(option.predicted_time_s) ? -1 : 1;
    const double time = sign < 0 ? option.predicted_time_s : std::round(option.predicted_time_s / best_s / kEqualTime);
    return std::tuple(time, candidate.exchanged_fraction, sign * candidate.bag_ranks, sign * candidate.nested);
  };
  std::ranges::stable_sort(ranked, {}, order);
  std::vector<TopologyOption> out;
  for (Candidate& candidate : ranked) out.push_back(std::move(candidate.option));
  return out;
}

std::string best_topology(StepInput input, std::string_view solver, bool fewest) {
  PlanInput& step = input.sequences;
  const auto lens = step.seq_lens.lens();
  const int64_t limit = step.max_tokens_per_rank;
  const auto count_of = [](int64_t count) {
    return static_cast<int32_t>(std::clamp<int64_t>(count, 1, StepInput::kMaxMicroBatches));
  };
  if (fewest && limit > 0) {
    const int64_t tokens = std::accumulate(lens.begin(), lens.end(), int64_t{0});
    input.num_micro_batches = count_of((tokens / limit + step.seq_lens.num_ranks()) / step.seq_lens.num_ranks());
  }
  const PlanInput all = limit > 0 ? input.all_at_once() : step;
  const std::vector<TopologyOption> ranked = rank_topologies({&all, 1}, solver);
  if (limit == 0 || (input.num_micro_batches == 1 && !fewest)) return ranked.front().topology;
  const int32_t last = fewest ? count_of(std::ssize(lens)) : input.num_micro_batches;
  for (; input.num_micro_batches <= last; ++input.num_micro_batches) {
    for (const TopologyOption& option : ranked) {
      step.topology = Topology::parse(option.topology, step.seq_lens.num_ranks());
      if (share_of_longest(step) > limit) continue;
      if (pack_by_tokens(step, input.num_micro_batches, false).keeps_limit) return option.topology;
    }
  }
  return ranked.front().topology;
}

}  // namespace knapformer
