#include "knapformer/core/planners/whole_step/packing.h"

#include <algorithm>

#include "knapformer/core/cost/step_time.h"
#include "knapformer/core/planners/balanced/anneal.h"
#include "knapformer/core/planners/balanced/construct.h"

namespace knapformer {

Packer::Packer(const PlanInput& input, int32_t num_micro_batches, int32_t stride)
    : input_(input), num_micro_batches_(num_micro_batches), stride_(stride) {
  const int32_t of_replicas = std::min(stride, input.topology.num_replicas());
  for (int32_t replica = 0; replica < input.topology.num_replicas(); replica += of_replicas) {
    trees_.emplace_back(input, replica, Objective::kTime, num_micro_batches, stride / of_replicas);
    if (input.max_tokens_per_rank > 0) trees_.back().set_token_limit(input.max_tokens_per_rank);
  }
  nodes_.resize(trees_.size());
}

Packing Packer::pack(const Levels& levels) {
  const bool is_alone = levels.margin_s == kInfinity;
  const double target_s = std::ranges::max(levels.levels_s) + (is_alone ? 0 : levels.margin_s);
  const auto fit_by = is_alone ? Construction::FitBy::kAlone : Construction::FitBy::kTime;
  for (size_t r = 0; r < trees_.size(); ++r) {
    trees_[r].set_levels(levels.levels_s);
    Construction(trees_[r]).place_all(target_s / trees_[r].unit_s(), fit_by, nodes_[r]);
  }
  return packing();
}

Packing Packer::anneal(std::vector<double> levels_s, Effort effort) {
  const std::vector<double> times_s = packing().times_s;
  for (size_t k = 0; k < levels_s.size(); ++k) levels_s[k] = std::min(levels_s[k], times_s[k]);
  const double bound_s = std::ranges::max(levels_s);
  for (size_t r = 0; r < trees_.size(); ++r) {
    trees_[r].set_levels(levels_s);
    trees_[r].update_all();
    const double bound = bound_s / trees_[r].unit_s();
    improve(trees_[r], nodes_[r], trees_[r].slowest(),
            {.num_moves = num_moves(trees_[r], effort.moves),
             .key = random_key(input_, static_cast<int32_t>(r)),
             .bound = bound,
             .good_enough = bound * Effort::kGoodEnough,
             .last_temperature = 0.0005});
  }
  return packing();
}

Packing Packer::packing() const {
  const auto num_placed = static_cast<size_t>(stride_ == 1 ? input_.seq_lens.num_sequences() : 0);
  Packing packing{.micro_batches = std::vector<int32_t>(num_placed),
                  .placements = std::vector<Placement>(num_placed),
                  .times_s = std::vector<double>(static_cast<size_t>(num_micro_batches_))};
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
  return Packer(tokens, num_micro_batches).pack({.levels_s = levels_s, .margin_s = in_whole_bags ? -limit_s : 0});
}

}  // namespace knapformer
