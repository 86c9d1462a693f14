#include "knapformer/core/planners/whole_step/micro_batch_packing.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "knapformer/core/util/infinity.h"
#include "knapformer/core/util/interrupt.h"
#include "knapformer/core/util/random.h"
#include "knapformer/core/util/winner_tree.h"

namespace knapformer {
MicroBatchPacking::MicroBatchPacking(const PlanInput& input, double bound_s, Sharing sharing)
    : bound_s_(bound_s),
      sharing_(sharing),
      max_tokens_(input.max_tokens_per_rank),
      num_sequences_(input.seq_lens.num_sequences()) {
  key_ = 0x6D6963726F626174u;
  for (const int64_t length : input.seq_lens.lens()) key_ = (key_ ^ static_cast<uint64_t>(length)) * Random::kGamma;
  replicas_.reserve(static_cast<size_t>(input.topology.num_replicas()));
  for (int32_t r = 0; r < input.topology.num_replicas(); ++r) replicas_.emplace_back(input, r, bound_s);
}

std::vector<double> MicroBatchPacking::levels_s(const PackingShape& shape, int32_t num_micro_batches) const {
  std::vector<double> levels(static_cast<size_t>(num_micro_batches), 0.0);
  std::vector<size_t> next(replicas_.size(), 0);  // the longest item that no level has room for yet
  // A level leaves room for a short sequence above its longest one: so the free time of a bin is never too small for
  // the short sequences that could fill it.
  double margin_s = 0;
  for (const PackedBins& bins : replicas_) {
    if (!bins.items.empty()) margin_s = std::max(margin_s, bins.items[bins.items.size() * 3 / 4].longest_s);
  }
  double left_s = bound_s_;
  for (int32_t k = 0; k < shape.used; ++k) {
    double longest_s = 0;
    for (size_t r = 0; r < replicas_.size(); ++r) {
      // Items come by descending work; if some are shared, the longest of the remaining ones need not be the first.
      const auto& items = replicas_[r].items;
      for (size_t i = next[r]; i < items.size(); ++i) {
        longest_s = std::max(longest_s, items[i].longest_s);
        if (items[i].num_leaves == 1) break;
      }
    }
    const double even_s = std::max(0.0, left_s) / (shape.used - k);
    if ((longest_s <= even_s && k >= shape.stepped) || k + 1 == shape.used) {
      for (int32_t j = k; j < shape.used; ++j) levels[j] = even_s;
      break;
    }
    levels[k] = std::min(longest_s + margin_s, std::max(0.0, left_s));
    left_s -= levels[k];
    for (size_t r = 0; r < replicas_.size(); ++r) {
      const auto& items = replicas_[r].items;
      double free_leaves = static_cast<double>(replicas_[r].leaves.size());
      for (; next[r] < items.size() && free_leaves > 0; ++next[r]) {
        const PackedBins::Item& item = items[next[r]];
        const double fit = item.longest_s > 0 ? std::max(1.0, std::floor(levels[k] / item.longest_s)) : 1.0;
        free_leaves -= item.num_leaves / fit;
      }
    }
  }
  return levels;
}

void MicroBatchPacking::fill(PackedBins& bins) const {
  bins.clear(levels_s_.size());
  const auto used = std::ranges::count_if(levels_s_, [](double level_s) { return level_s > 0; });  // those come first
  const int32_t num_sharing = sharing_ == Sharing::kSpread ? std::max(1, static_cast<int32_t>(used)) : 1;
  InterruptChecks checks;
  for (size_t i = 0; i < bins.items.size(); ++i) {
    if (bins.items[i].shared_node < 0) continue;
    bins.share(static_cast<int32_t>(i), num_sharing);
    checks.count(int64_t{num_sharing} * bins.num_leaves());
  }
  // How full a bin is, in seconds: its load, or its level times the part of its token capacity that is used.
  const auto fullness_s = [&](int32_t bin) {
    const double load_s =
        bins.token_s[bin] + bins.attention_s[bin] + bins.groups[bin].exchange_per_token * bins.shared_tokens[bin];
    if (max_tokens_ == 0) return load_s;
    return std::max(load_s, levels_s_[bins.micro_batch_of(bin)] * bins.tokens[bin] / bins.leaf_of(bin).token_capacity);
  };
  /// The bins of one kind in one micro-batch, and the next one to fill.
  struct Queue {
    int32_t micro_batch;
    const PackedBins::Class* kind;
    WinnerTree fullness;
    int32_t bin = 0;
    double min_s = 0, free_tokens = 0;
  };
  const auto find_next = [&](Queue& queue) {
    const auto now_s = [&] {
      queue.bin = queue.micro_batch * bins.num_leaves() + queue.kind->leaves[queue.fullness.winner()];
      return fullness_s(queue.bin);
    };
    // Shared items are in bins already: refresh the minimum until it stays the minimum.
    double now = now_s();
    while (now > queue.fullness.min()) {
      queue.fullness.set_min(now);
      now = now_s();
    }
    queue.min_s = queue.fullness.min();
    queue.free_tokens = bins.free_tokens(queue.bin);
  };
  std::vector<Queue> queues;
  for (size_t k = 0; k < levels_s_.size(); ++k) {
    if (levels_s_[k] <= 0 && k > 0) continue;
    for (const PackedBins::Class& kind : bins.classes) {
      queues.push_back(
          {.micro_batch = static_cast<int32_t>(k), .kind = &kind, .fullness = WinnerTree(kind.leaves.size())});
      find_next(queues.back());
    }
  }
  for (size_t i = 0; i < bins.items.size(); ++i) {
    const PackedBins::Item& item = bins.items[i];
    if (item.shared_node >= 0) continue;
    Queue* best = nullptr;
    double min_s = kInfinity;
    bool best_fits = false;
    for (Queue& queue : queues) {
      const bool fits = item.tokens <= queue.free_tokens;
      const double then_s = queue.min_s + item.tokens * queue.kind->time_per_token +
                            item.attention * queue.kind->time_per_attention - levels_s_[queue.micro_batch];
      if (best != nullptr && (fits != best_fits ? best_fits : then_s >= min_s)) continue;
      best = &queue;
      min_s = then_s;
      best_fits = fits;
    }
    KNAPFORMER_ASSERT(best != nullptr);
    bins.put(static_cast<int32_t>(i), best->bin);
    find_next(*best);
  }
}

std::vector<double> MicroBatchPacking::times_s() const {
  std::vector<double> times(levels_s_.size(), 0.0);
  for (const PackedBins& bins : replicas_) {
    for (int32_t bin = 0; bin < bins.num_bins(); ++bin) {
      double& time_s = times[bins.micro_batch_of(bin)];
      if (bins.groups[bin].first == bin) time_s = std::max(time_s, bins.group_s(bins.groups[bin]));
    }
  }
  return times;
}

std::vector<double> MicroBatchPacking::pack(std::vector<double> levels_s) {
  levels_s_ = std::move(levels_s);
  is_whole_.assign(levels_s_.size(), 1);
  for (PackedBins& bins : replicas_) {
    fill(bins);
    for (int32_t bin = 0; bin < bins.num_bins(); ++bin) {
      if (bins.free_tokens(bin) < 0 || bins.shared_tokens[bin] > 0) is_whole_[bins.micro_batch_of(bin)] = 0;
    }
  }
  return times_s();
}

std::vector<double> MicroBatchPacking::refine(const SwapLimits& limits) {
  for (PackedBins& bins : replicas_) swap_between_bins(bins, levels_s_, key_, limits);
  return times_s();
}

double MicroBatchPacking::overflow() const {
  if (max_tokens_ == 0) return 0;
  double over = 0, all = 0;
  for (const PackedBins& bins : replicas_) {
    std::vector<double> free(levels_s_.size(), 0.0);  // by micro-batch
    for (int32_t bin = 0; bin < bins.num_bins(); ++bin) {
      free[bins.micro_batch_of(bin)] += bins.free_tokens(bin);
      over += std::max(0.0, -bins.free_tokens(bin));
      all += bins.tokens[bin];
    }
    if (std::ranges::any_of(free, [](double tokens) { return tokens < 0; })) return kInfinity;
  }
  return all > 0 ? over / all : 0;
}

std::vector<PackedSequence> MicroBatchPacking::sequences() const {
  std::vector<PackedSequence> out(static_cast<size_t>(num_sequences_));
  for (const PackedBins& bins : replicas_) {
    for (size_t i = 0; i < bins.items.size(); ++i) {
      const int32_t bin = bins.bin_of_item[i];
      const int32_t node = bins.node_of_item[i] >= 0 ? bins.node_of_item[i] : bins.leaf_of(bin).node;
      out[bins.trees.items()[i].id.index()] = {.micro_batch = bins.micro_batch_of(bin),
                                               .placement = bins.trees.placement(node)};
    }
  }
  return out;
}

}  // namespace knapformer
