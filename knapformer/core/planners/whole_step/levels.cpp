#include "knapformer/core/planners/whole_step/levels.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>
#include <utility>

#include "knapformer/core/cost/accumulation.h"
#include "knapformer/core/cost/step_time.h"
#include "knapformer/core/util/infinity.h"

namespace knapformer {
namespace {

class LevelSearch {
 public:
  LevelSearch(const StepInput& input, int32_t num_micro_batches, Effort effort)
      : input_(input),
        count_(num_micro_batches),
        is_low_(effort.moves == Effort::kLow),
        sum_s_(blocks_lower_bound_s(input)),
        floor_s_(replica_step_s(input.sequences, 0, 0) / input.sequences.model.num_blocks),
        sample_(input.sequences, num_micro_batches, sample_stride(input, num_micro_batches)) {}

  std::vector<Levels> run() {
    for (int32_t used = count_; used > 1 || used == count_; used /= 2) try_steps(used);
    for (const double margin : kMargins) try_levels(tried_.front().levels_s, margin);
    for (int32_t i = 0; i < (is_low_ ? 2 : 4) && !is_good(); ++i) shift_best(0.08 * sum_s_ / count_ / (1 << i));
    std::erase_if(tried_, [](const Levels& tried) { return tried.time_s == kInfinity; });
    return std::move(tried_);
  }

 private:
  /// In units of the mean level.
  static constexpr double kMargin = 0.004, kMargins[] = {kMargin, 0.02, 0.06, kInfinity};

  bool is_good() const { return tried_.front().time_s <= good_s_; }

  void try_steps(int32_t used) {
    const double least_s = levels_time_s(input_, std::vector<double>(static_cast<size_t>(used), sum_s_ / used));
    if (!tried_.empty() && tried_.front().time_s <= least_s) return;
    good_s_ = std::min(good_s_, least_s * (is_low_ ? 1.002 : 1.001));
    for (const int32_t max_steps : {0, 1, 2, 3, used}) {
      const std::vector<double> levels_s = stepped_levels_s(used, max_steps, 0);
      for (const double margin : kMargins) try_levels(levels_s, margin);
    }
    const int32_t num_heights = is_low_ ? 10 : 20;
    const double spread_s = (sum_s_ / used - floor_s_) * (used - 1);  // of the first level, above even ones
    for (int32_t i = 0; i <= num_heights && spread_s > 0 && !is_good(); ++i) {
      for (const int32_t max_steps : {1, used}) {
        const std::vector<double> levels_s =
            stepped_levels_s(used, max_steps, sum_s_ / used + spread_s * i / num_heights);
        try_levels(levels_s, kMargin);
        if (!is_low_) try_levels(levels_s, kMargins[1]);
      }
    }
  }

  /// Shifts each of the first two levels up or down, and those after it the other way, where that is better.
  void shift_best(double by_s) {
    for (size_t k = 0; k < 2; ++k) {
      for (const double sign : {1.0, -1.0}) {
        const Levels best = tried_.front();
        std::vector<double> levels_s = best.levels_s;
        const auto used =
            static_cast<size_t>(std::ranges::count_if(levels_s, [](double level_s) { return level_s > 0; }));
        if (k + 1 >= used) return;
        levels_s[k] += sign * by_s;
        for (size_t j = k + 1; j < used; ++j) levels_s[j] -= sign * by_s / static_cast<double>(used - k - 1);
        if (std::ranges::min(levels_s) >= 0) try_levels(std::move(levels_s), best.margin_s * count_ / sum_s_);
      }
    }
  }

  void try_levels(std::vector<double> levels_s, double margin) {
    levels_s.resize(static_cast<size_t>(count_));
    Levels levels{.levels_s = std::move(levels_s), .margin_s = margin * sum_s_ / count_};
    const auto is_same = [&](const Levels& tried) {
      return tried.levels_s == levels.levels_s && tried.margin_s == levels.margin_s;
    };
    if (std::ranges::any_of(tried_, is_same)) return;
    levels.time_s = packed_s(input_, sample_.pack(levels));
    tried_.insert(std::ranges::upper_bound(tried_, levels.time_s, {}, &Levels::time_s), levels);
  }

  /// The shortest time of a whole item, or of one that so few ranks share that it fits into the step; and their number.
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

  /// `max_steps`: so many levels at most are above even ones. `first_s`: the first of them; 0 if it is a step as well.
  std::vector<double> stepped_levels_s(int32_t used, int32_t max_steps, double first_s) const {
    const std::span<const PlacementTrees> replicas = sample_.trees();
    std::vector<double> levels_s;
    std::vector<size_t> next(replicas.size());  // the longest item that no level has room for yet
    double left_s = sum_s_;
    for (int32_t k = 0; k < used; ++k) {
      double longest_s = k == 0 ? first_s : 0;
      for (size_t r = 0; r < replicas.size() && (k > 0 || first_s == 0); ++r) {
        const auto items = replicas[r].items().subspan(next[r]);
        if (!items.empty()) longest_s = std::max(longest_s, least_of(replicas[r], items.front()).first);
      }
      const double even_s = left_s / (used - k);
      if (longest_s <= even_s || k + 1 == used || k == max_steps) {
        levels_s.resize(static_cast<size_t>(used), even_s);
        break;
      }
      levels_s.push_back(std::max(even_s, std::min(longest_s, left_s - floor_s_ * (used - k - 1))));
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
  bool is_low_;
  double sum_s_, floor_s_;
  double good_s_ = kInfinity;
  Packer sample_;
  std::vector<Levels> tried_;  // the best first
};

}  // namespace

int32_t sample_stride(const StepInput& input, int32_t num_micro_batches) {
  constexpr int32_t kRanks = 128;  // of all micro-batches
  return std::max(1, input.sequences.topology.num_ranks() * num_micro_batches / kRanks);
}

std::vector<Levels> ranked_levels(const StepInput& input, int32_t num_micro_batches, Effort effort) {
  return LevelSearch(input, num_micro_batches, effort).run();
}

double levels_time_s(const StepInput& input, std::vector<double> block_s) {
  block_s.resize(static_cast<size_t>(input.num_micro_batches));  // those that stay empty take time too
  const double sum_s = std::accumulate(block_s.begin(), block_s.end(), 0.0);
  const double highest_s = std::ranges::max(block_s);
  const double mean_over_highest = highest_s > 0 ? sum_s / input.num_micro_batches / highest_s : 1;
  const double time_s = accumulated_s(input, block_s) + 0.01 * input.sequences.model.num_blocks * sum_s;
  return time_s * (1 + 2e-3 * (1 - mean_over_highest));
}

double packed_s(const StepInput& input, const Packing& packing) {
  return packing.keeps_limit ? levels_time_s(input, packing.times_s) : kInfinity;
}

}  // namespace knapformer
