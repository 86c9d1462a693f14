#include "knapformer/core/planners/whole_step/packing.h"

#include <algorithm>
#include <numeric>

#include "knapformer/core/cost/step_time.h"
#include "knapformer/core/planners/balanced/anneal.h"
#include "knapformer/core/util/error.h"

namespace knapformer {

Packer::Packer(const PlanInput& input, int32_t num_micro_batches, bool enforces_limit, int32_t stride)
    : input_(input), num_micro_batches_(num_micro_batches), stride_(stride) {
  const int32_t of_replicas = std::min(stride, input.topology.num_replicas());
  for (int32_t replica = 0; replica < input.topology.num_replicas(); replica += of_replicas) {
    trees_.emplace_back(input, replica, num_micro_batches, stride / of_replicas);
    if (enforces_limit) trees_.back().enforce_limit();
  }
  nodes_.resize(trees_.size());
}

Packing Packer::pack(const Levels& levels) {
  const double target_s = std::ranges::max(levels.levels_s) + levels.margin_s;
  for (size_t r = 0; r < trees_.size(); ++r) {
    trees_[r].set_levels(levels.levels_s);
    GroupChooser(trees_[r]).place_all(target_s / trees_[r].unit_s(), levels.sharing, nodes_[r]);
  }
  return packing(levels.levels_s);
}

Packing Packer::anneal(const Packing& last, Effort effort) {
  std::vector<double> levels_s;
  std::ranges::transform(last.levels_s, last.times_s, std::back_inserter(levels_s), std::ranges::min);
  const double mean_s = std::accumulate(levels_s.begin(), levels_s.end(), 0.0) / num_micro_batches_;
  const double bound_s = std::ranges::max(levels_s), enough_s = bound_s + (Effort::kGoodEnough - 1) * mean_s;
  for (size_t r = 0; r < trees_.size(); ++r) {
    trees_[r].set_levels(levels_s);
    improve(trees_[r], nodes_[r],
            {.num_moves = effort.num_moves(std::ssize(trees_[r].items()), trees_[r].misses_enforced_limit()),
             .key = random_key(input_, static_cast<int32_t>(r)),
             .bound = bound_s / trees_[r].unit_s(),
             .good_enough = enough_s / trees_[r].unit_s(),
             .shares_least_first = true});
  }
  return packing(levels_s);
}

Packing Packer::packing(const std::vector<double>& levels_s) const {
  const auto num_placed = static_cast<size_t>(stride_ == 1 ? input_.seq_lens.num_sequences() : 0);
  Packing packing{.micro_batches = std::vector<int32_t>(num_placed),
                  .placements = std::vector<Placement>(num_placed),
                  .times_s = std::vector<double>(static_cast<size_t>(num_micro_batches_)),
                  .levels_s = levels_s};
  for (size_t r = 0; r < trees_.size(); ++r) {
    const PlacementTrees& trees = trees_[r];
    packing.keeps_limit = packing.keeps_limit && trees.keeps_limit();
    for (int32_t bag = 0; bag < trees.num_bags(); ++bag) {
      const double seconds = (trees.bag_time(bag) - trees.node(trees.root(bag)).head_start) * trees.unit_s();
      double& time_s = packing.times_s[trees.micro_batch_of(bag)];
      time_s = std::max(time_s, seconds);
    }
    for (size_t i = 0; i < nodes_[r].size() && num_placed > 0; ++i) {
      const size_t s = trees.items()[i].id.index();
      packing.micro_batches[s] = trees.micro_batch_of(trees.node(nodes_[r][i]).bag);
      packing.placements[s] = trees.placement(nodes_[r][i]);
    }
  }
  return packing;
}

Packing pack_by_tokens(const PlanInput& input, int32_t num_micro_batches, bool in_whole_bags) {
  // Without attention and exchanges, time is tokens.
  PlanInput tokens = input;
  tokens.workload.gamma = 0;
  tokens.given_work.clear();
  tokens.rank_speed.clear();
  tokens.cluster = {
      .node_bytes_per_s = kInfinity, .network_bytes_per_s = kInfinity, .node_latency_s = 0, .network_latency_s = 0};
  const double limit_s = static_cast<double>(input.max_tokens_per_rank) * BlockRates(tokens).token_s * (1 + 1e-9);
  const std::vector<double> levels_s(static_cast<size_t>(num_micro_batches), limit_s);
  const auto sharing = in_whole_bags ? GroupChooser::Sharing::kMost : GroupChooser::Sharing::kToFit;
  return Packer(tokens, num_micro_batches, true).pack({.levels_s = levels_s, .sharing = sharing});
}

Packing pack_at_home(const StepInput& input) {
  const PlanInput& step = input.sequences;
  Packing packing{.micro_batches = micro_batches_as_given(step.seq_lens, input.num_micro_batches)};
  for (SequenceId id(0); id.value < step.seq_lens.num_sequences(); ++id.value) {
    const Rank home = step.seq_lens.home_of(id);
    const BagId bag = step.topology.bag_of(home);
    const int32_t first = step.topology.bag(bag).first_rank.value;
    const int32_t degree = step.topology.shapes()[step.topology.bag(bag).shape].degrees.front();
    packing.placements.push_back(
        {.bag = bag, .first_rank = Rank(home.value - (home.value - first) % degree), .degree = degree});
  }
  return packing;
}

std::optional<Packing> pack_one_by_one(const StepInput& input) {
  const Topology& topology = input.sequences.topology;
  Packing packing;
  for (int32_t r = 0; r < topology.num_replicas(); ++r) {
    const auto [first, last] = input.sequences.sequences_of(r);
    if (last.value - first.value > input.num_micro_batches) return std::nullopt;
    const BagId bag((r + 1) * topology.num_bags_per_replica() - 1);
    for (int32_t k = 0; k < last.value - first.value; ++k) {
      packing.micro_batches.push_back(k);
      packing.placements.push_back(
          {.bag = bag, .first_rank = topology.bag(bag).first_rank, .degree = topology.bag(bag).num_ranks});
    }
  }
  return packing;
}

}  // namespace knapformer
