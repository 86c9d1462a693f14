#include "knapformer/core/planners/whole_step/levels.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "knapformer/core/cost/bounds.h"
#include "knapformer/core/cost/step_time.h"
#include "knapformer/core/util/error.h"

namespace knapformer {
namespace {

using Sharing = GroupChooser::Sharing;

/// Of each micro-batch's bags and sequences, one of so many shows which levels are good.
int32_t sample_stride(const StepInput& input, int32_t num_micro_batches) {
  constexpr int32_t kRanks = 128;  // of all micro-batches
  return std::max(1, input.sequences.topology.num_ranks() * num_micro_batches / kRanks);
}

/// How long a step of these block times takes, for comparisons. Where FSDP hides all of a block, shorter blocks are
/// better still: so a hundredth of the blocks' time is added. A micro-batch of twice the mean time holds twice the
/// tokens: it must shorten the step by 0.1 %. Half or double of either changes steps by less than 0.05 %.
double levels_time_s(const StepInput& input, std::vector<double> block_s) {
  block_s.resize(static_cast<size_t>(input.num_micro_batches));  // those that stay empty take time too
  const double sum_s = std::accumulate(block_s.begin(), block_s.end(), 0.0);
  const double highest_s = std::ranges::max(block_s);
  const double mean_over_highest = highest_s > 0 ? sum_s / input.num_micro_batches / highest_s : 1;
  const double time_s = blocks_and_fsdp_s(input, block_s) + 0.01 * input.sequences.model.num_blocks * sum_s;
  return time_s * (1 + 2e-3 * (1 - mean_over_highest));
}

/// The same; infinite if the packing exceeds a limit of tokens that is enforced.
double packed_s(const StepInput& input, const Packing& packing, bool enforces_limit) {
  return packing.keeps_limit || !enforces_limit ? levels_time_s(input, packing.times_s) : kInfinity;
}

class LevelSearch {
 public:
  LevelSearch(const StepInput& input, int32_t num_micro_batches, Effort effort, bool enforces_limit)
      : input_(input),
        count_(num_micro_batches),
        is_low_(effort.moves == Effort::kLow),
        enforces_limit_(enforces_limit),
        sum_s_(blocks_lower_bound_s(input)),
        floor_s_(replica_step_s(input.sequences, 0) / input.sequences.model.num_blocks),
        sample_(input.sequences, num_micro_batches, enforces_limit, sample_stride(input, num_micro_batches)) {}

  std::vector<Levels> run() {
    const double mean_s = sum_s_ / count_;
    const double spread_s = (mean_s - floor_s_) * (count_ - 1);  // of the first level, above even ones
    const double good_s =
        levels_time_s(input_, std::vector<double>(static_cast<size_t>(count_), mean_s)) * Effort::kGoodStart;
    const auto is_good = [&] { return tried_.front().time_s <= good_s; };
    for (const int32_t max_steps : {0, 1, 2, 3, count_}) {
      const std::vector<double> levels_s = stepped_levels_s(max_steps, 0);
      for (const auto& [margin, sharing] : kTried) try_levels(levels_s, margin, sharing);
    }
    const int32_t num_heights = is_low_ ? 10 : 20;
    for (int32_t i = 0; i <= num_heights && spread_s > 0 && !is_good(); ++i) {
      for (const int32_t max_steps : {1, count_}) {
        const std::vector<double> levels_s = stepped_levels_s(max_steps, mean_s + spread_s * i / num_heights);
        try_levels(levels_s, kMargin, Sharing::kToFit);
      }
    }
    for (const auto& [margin, sharing] : kTried) try_levels(tried_.front().levels_s, margin, sharing);
    for (int32_t i = 0; i < (is_low_ ? 2 : 6) && !is_good(); ++i) shift_best(0.08 * mean_s / (1 << i));
    std::erase_if(tried_, [](const Levels& tried) { return tried.time_s == kInfinity; });
    return std::move(tried_);
  }

 private:
  /// In units of the mean level.
  static constexpr double kMargin = 0.004;
  static constexpr std::pair<double, Sharing> kTried[] = {
      {kMargin, Sharing::kToFit}, {0.02, Sharing::kToFit}, {0, Sharing::kLeast}};

  /// Shifts each of the first two levels up or down, and those after it the other way, where that is better.
  void shift_best(double by_s) {
    for (int32_t k = 0; k < std::min(2, count_ - 1); ++k) {
      for (const double shift_s : {by_s, -by_s}) {
        const Levels best = tried_.front();
        std::vector<double> levels_s = best.levels_s;
        levels_s[k] += shift_s;
        for (int32_t j = k + 1; j < count_; ++j) levels_s[j] -= shift_s / (count_ - k - 1);
        if (std::ranges::min(levels_s) >= 0)
          try_levels(std::move(levels_s), best.margin_s * count_ / sum_s_, best.sharing);
      }
    }
  }

  void try_levels(std::vector<double> levels_s, double margin, Sharing sharing) {
    Levels levels{.levels_s = std::move(levels_s), .margin_s = margin * sum_s_ / count_, .sharing = sharing};
    const auto is_same = [&](const Levels& tried) {
      return tried.levels_s == levels.levels_s && tried.margin_s == levels.margin_s && tried.sharing == levels.sharing;
    };
    if (std::ranges::any_of(tried_, is_same)) return;
    levels.time_s = packed_s(input_, sample_.pack(levels), enforces_limit_);
    tried_.insert(std::ranges::upper_bound(tried_, levels.time_s, {}, &Levels::time_s), levels);
  }

  /// The item's time on the fewest ranks with which it fits into the step, cut evenly; and their number.
  std::pair<double, int32_t> least_of(const PlacementTrees& trees, const TreeItem& item) const {
    int32_t v = 0;
    for (const int32_t degree : trees.degrees()) {
      int32_t bag = 0;
      while (trees.nodes_of(bag, degree).first == trees.nodes_of(bag, degree).second) ++bag;
      v = trees.nodes_of(bag, degree).first;
      if (trees.cost(item, v) * trees.unit_s() <= sum_s_) break;
    }
    return {trees.cost(item, v) * trees.unit_s(), trees.node(v).degree};
  }

  /// `max_steps`: how many levels may be above even ones. `first_s`: the first level; 0: that of the longest item.
  std::vector<double> stepped_levels_s(int32_t max_steps, double first_s) const {
    const std::vector<PlacementTrees>& replicas = sample_.trees();
    std::vector<double> levels_s;
    std::vector<size_t> next(replicas.size());  // the longest item that no level has room for yet
    double left_s = sum_s_;
    for (int32_t k = 0; k < count_; ++k) {
      double longest_s = k == 0 ? first_s : 0;
      for (size_t r = 0; r < replicas.size() && (k > 0 || first_s == 0); ++r) {
        const auto items = replicas[r].items().subspan(next[r]);
        if (!items.empty()) longest_s = std::max(longest_s, least_of(replicas[r], items.front()).first);
      }
      const double even_s = left_s / (count_ - k);
      if (longest_s <= even_s || k + 1 == count_ || k == max_steps) {
        levels_s.resize(static_cast<size_t>(count_), even_s);
        break;
      }
      levels_s.push_back(std::max(even_s, std::min(longest_s, left_s - floor_s_ * (count_ - k - 1))));
      left_s -= levels_s.back();
      for (size_t r = 0; r < replicas.size(); ++r) {
        const auto items = replicas[r].items();
        for (double free_ranks = replicas[r].num_ranks_per_micro_batch(); next[r] < items.size() && free_ranks > 0;
             ++next[r]) {
          const auto [seconds, degree] = least_of(replicas[r], items[next[r]]);
          free_ranks -= degree / std::max(1.0, std::floor(levels_s.back() / seconds));
        }
      }
    }
    return levels_s;
  }

  const StepInput& input_;
  int32_t count_;
  bool is_low_, enforces_limit_;
  double sum_s_, floor_s_;
  Packer sample_;
  std::vector<Levels> tried_;  // the best first
};

std::optional<Packing> best_packing(const StepInput& input, int32_t num_micro_batches, Effort effort,
                                    bool enforces_limit) {
  const std::vector<Levels> tried = LevelSearch(input, num_micro_batches, effort, enforces_limit).run();
  // A sample shows which levels are good, but not which are the best, nor whether all sequences keep the limit.
  const bool is_sampled = sample_stride(input, num_micro_batches) > 1;
  const size_t num_packed = !is_sampled ? 1 : effort.moves == Effort::kLow ? 2 : 6, most_packed = 8;
  Packer packer(input.sequences, num_micro_batches, enforces_limit);
  std::optional<Packing> best;
  const Levels* best_levels = nullptr;
  double best_s = kInfinity;
  for (size_t i = 0; i < std::min(tried.size(), best ? num_packed : most_packed); ++i) {
    Packing packing = packer.pack(tried[i]);
    const double time_s = packed_s(input, packing, enforces_limit);
    if (time_s >= best_s) continue;
    best_s = time_s;
    best = std::move(packing);
    best_levels = &tried[i];
  }
  if (!best || effort.moves == Effort::kLow) return best;
  if (best_s <= levels_time_s(input, best->levels_s) * Effort::kGoodEnough) return best;
  // Annealing finds its way better from what shares the least. Always from there: joint's three micro-batches on the
  // default cluster are 0.1 % longer; never: mixed's three are on links alone (the goals of step_solver_test.cpp).
  constexpr double kAboutAsShort = 1.006;
  const auto alone = std::ranges::find(tried, Sharing::kLeast, &Levels::sharing);
  Packing start = packer.pack(alone == tried.end() ? *best_levels : *alone);
  if (packed_s(input, start, enforces_limit) >= best_s * kAboutAsShort) start = packer.pack(*best_levels);
  Packing annealed = packer.anneal(start, effort);
  return packed_s(input, annealed, enforces_limit) < best_s ? annealed : best;
}

}  // namespace

std::optional<Packing> pack_by_time(const StepInput& input, int32_t num_micro_batches, Effort effort) {
  std::optional<Packing> packing = best_packing(input, num_micro_batches, effort, false);
  return packing && packing->keeps_limit ? packing : best_packing(input, num_micro_batches, effort, true);
}

}  // namespace knapformer
