#include "knapformer/core/planners/whole_step/bin_swaps.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "knapformer/core/util/infinity.h"
#include "knapformer/core/util/interrupt.h"
#include "knapformer/core/util/random.h"
#include "knapformer/core/util/winner_tree.h"

namespace knapformer {
namespace {

/// What a bin gives away or takes: nothing, a sequence, or two.
struct Lot {
  double tokens = 0, attention = 0;
  int32_t items[2] = {-1, -1};
};

/// The excess of a bin is its time above the level of its micro-batch. When the fullest bin of a micro-batch can give
/// nothing away any more, its time becomes the micro-batch's level: so the other bins of the micro-batch may take more,
/// and the bins of other micro-batches hold less.
class BinSwaps {
 public:
  BinSwaps(PackedBins& bins, std::span<const double> levels_s, uint64_t seed)
      : packed_(bins), levels_s_(levels_s), random_(seed) {
    for (int32_t bin = 0; bin < packed_.num_bins(); ++bin) {
      if (levels_s_[packed_.micro_batch_of(bin)] > 0) bins_.push_back(bin);
    }
  }

  void run(const SwapLimits& limits) {
    trials_left_ = limits.num_trials;
    double best_s = descend(limits.good_enough_s);
    std::vector<int32_t> best;
    for (int32_t i = 0; i < limits.num_kicks && best_s > limits.good_enough_s && trials_left_ > 0; ++i) {
      best = packed_.bin_of_item;
      kick();
      const double now_s = descend(limits.good_enough_s);
      if (now_s < best_s) {
        best_s = now_s;
      } else {
        restore(best);
      }
    }
  }

 private:
  static constexpr size_t kFewForPairs = 4096;
  /// Between two bins, where pairs are tried: those of two bins of 63 sequences.
  static constexpr int64_t kMostOfPairs = int64_t{1} << 22;

  /// Swaps until none helps. Returns the sum of the times.
  double descend(double good_enough_s) {
    level_s_.assign(levels_s_.begin(), levels_s_.end());
    is_settled_.assign(level_s_.size(), 0);
    excess_s_ = excesses();
    sum_s_ = std::accumulate(level_s_.begin(), level_s_.end(), 0.0);
    num_open_ = static_cast<int32_t>(std::ranges::count_if(level_s_, [](double level_s) { return level_s > 0; }));
    std::vector<double> keys;
    for (int32_t bin = 0; bin < packed_.num_bins(); ++bin)
      keys.push_back(level_of(bin) > 0 ? -excess_s_[bin] : kInfinity);
    fullest_ = WinnerTree(keys);
    const bool tries_pairs = packed_.items.size() <= kFewForPairs;
    while (trials_left_ > 0 && num_open_ > 0 && sum_s_ + num_open_ * max_excess_s() > good_enough_s) {
      const int32_t bin = fullest_.winner();
      find(bin, /*with_pairs=*/false);
      if (best_bin_ < 0 && tries_pairs) find(bin, /*with_pairs=*/true);
      if (best_bin_ < 0) {
        settle(packed_.micro_batch_of(bin));
      } else {
        swap();
      }
    }
    return sum_s_ + (num_open_ > 0 ? num_open_ * max_excess_s() : 0.0);
  }

  void kick() {
    constexpr int32_t kSwaps = 3;
    for (int32_t i = 0; i < kSwaps; ++i) {
      const int32_t bins[] = {bins_[random_.below(static_cast<int32_t>(bins_.size()))],
                              bins_[random_.below(static_cast<int32_t>(bins_.size()))]};
      if (bins[0] == bins[1]) continue;
      Lot lots[2];
      for (int32_t side = 0; side < 2; ++side) {
        list_lots(bins[side], false, given_);
        if (!given_.empty()) lots[side] = given_[random_.below(static_cast<int32_t>(given_.size()))];
      }
      const double tokens = lots[0].tokens - lots[1].tokens;
      if (-tokens > packed_.free_tokens(bins[0]) || tokens > packed_.free_tokens(bins[1])) continue;
      move(lots[0], bins[0], bins[1]);
      move(lots[1], bins[1], bins[0]);
    }
  }

  void restore(const std::vector<int32_t>& bin_of_item) {
    for (size_t i = 0; i < bin_of_item.size(); ++i) {
      const int32_t from = packed_.bin_of_item[i];
      if (from == bin_of_item[i]) continue;
      packed_.take_out(static_cast<int32_t>(i), from);
      packed_.put(static_cast<int32_t>(i), bin_of_item[i]);
    }
  }

  void set_excess(int32_t bin, double excess_s) { fullest_.set(bin, -excess_s); }
  double max_excess_s() const { return -fullest_.min(); }

  double level_of(int32_t bin) const { return level_s_[packed_.micro_batch_of(bin)]; }
  /// The excess of the bin's group.
  double excess(int32_t bin) const { return packed_.group_s(packed_.groups[bin]) - level_of(bin); }
  std::vector<double> excesses() const {
    std::vector<double> out;
    for (int32_t bin = 0; bin < packed_.num_bins(); ++bin) out.push_back(excess(bin));
    return out;
  }
  /// The longest attention in the bin's group, leaving out the bin and `another`.
  double others_attention_s(int32_t bin, int32_t another) const {
    const PackedBins::Group& group = packed_.groups[bin];
    double longest_s = -kInfinity;
    for (int32_t b = group.first; b < group.first + group.size; ++b) {
      if (b != bin && b != another) longest_s = std::max(longest_s, packed_.attention_less_exchange_s(b));
    }
    return longest_s;
  }

  /// Without pairs where they would be more than two bins may try.
  void list_lots(int32_t bin, bool with_pairs, std::vector<Lot>& lots) const {
    lots.clear();
    for (int32_t i = packed_.first_item[bin]; i >= 0; i = packed_.next_item[i])
      lots.push_back({.tokens = packed_.items[i].tokens, .attention = packed_.items[i].attention, .items = {i, -1}});
    const size_t num_single = lots.size();
    const auto num_lots = static_cast<int64_t>(num_single * (num_single + 1) / 2);
    if (!with_pairs || num_lots * num_lots > kMostOfPairs) return;
    for (size_t a = 0; a < num_single; ++a) {
      for (size_t b = a + 1; b < num_single; ++b) {
        lots.push_back({.tokens = lots[a].tokens + lots[b].tokens,
                        .attention = lots[a].attention + lots[b].attention,
                        .items = {lots[a].items[0], lots[b].items[0]}});
      }
    }
  }

  void find(int32_t fullest, bool with_pairs) {
    const PackedBins::Group& group = packed_.groups[fullest];
    best_bin_ = -1;
    best_s_ = excess_s_[fullest] - std::max(std::abs(excess_s_[fullest]) * 1e-6, level_of(fullest) * 1e-9);
    for (int32_t bin = group.first; bin < group.first + group.size; ++bin) find_from(bin, with_pairs);
  }

  /// Finds the swap after which the higher excess of the two bins' groups is lowest, if that is below the best so far.
  /// Tries all other bins, or a sample if they are many, and stops after the first few bins that give a swap.
  void find_from(int32_t bin, bool with_pairs) {
    constexpr int32_t kSample = 32, kMostTried = 8 * kSample;
    list_lots(bin, with_pairs, given_);
    const PackedBins::Leaf& leaf = packed_.leaf_of(bin);
    const PackedBins::Group& group = packed_.groups[bin];
    const double token_s = packed_.token_sum_s(group), here_attention_s = packed_.attention_less_exchange_s(bin);
    const double level_s = level_of(bin);
    const auto count = static_cast<int32_t>(bins_.size());
    const bool tries_all = count <= kMostTried;
    const int32_t num_tried = std::min(count, kMostTried), start = random_.below(count);
    if (given_.empty()) return;  // shared sequences alone
    for (int32_t t = 0; t < num_tried; ++t) {
      if (t % kSample == 0 && best_bin_ >= 0) break;
      const int32_t other = bins_[tries_all ? (start + t) % count : random_.below(count)];
      const PackedBins::Group& other_group = packed_.groups[other];
      const bool is_same = other_group.first == group.first;
      if (other == bin || (!is_same && excess_s_[other] >= best_s_)) continue;
      const PackedBins::Leaf& other_leaf = packed_.leaf_of(other);
      list_lots(other, with_pairs, taken_);
      taken_.push_back({});
      trials_left_ -= std::ssize(given_) * std::ssize(taken_);
      checks_.count(std::ssize(given_) * std::ssize(taken_));
      if (group.size == 1 && other_group.size == 1) {
        // Nothing is shared, as nearly everywhere.
        try_lots(bin, other, [&](double tokens, double attention) {
          return std::max(
              excess_s_[bin] - tokens * leaf.time_per_token - attention * leaf.time_per_attention,
              excess_s_[other] + tokens * other_leaf.time_per_token + attention * other_leaf.time_per_attention);
        });
        continue;
      }
      const double rest_s = others_attention_s(bin, other), other_rest_s = others_attention_s(other, bin);
      const double other_token_s = packed_.token_sum_s(other_group);
      const double there_attention_s = packed_.attention_less_exchange_s(other);
      const double other_level_s = level_of(other);
      try_lots(bin, other, [&](double tokens, double attention) {
        const double here_s = std::max(
            rest_s, here_attention_s - attention * leaf.time_per_attention + tokens * group.exchange_per_token);
        const double there_s = std::max(other_rest_s, there_attention_s + attention * other_leaf.time_per_attention -
                                                          tokens * other_group.exchange_per_token);
        if (is_same) {
          return (token_s + tokens * (other_leaf.time_per_token - leaf.time_per_token)) / group.size +
                 std::max(here_s, there_s) - level_s;
        }
        const double less_s = tokens * (leaf.time_per_token + group.exchange_per_token);
        const double more_s = tokens * (other_leaf.time_per_token + other_group.exchange_per_token);
        return std::max((token_s - less_s) / group.size + here_s - level_s,
                        (other_token_s + more_s) / other_group.size + there_s - other_level_s);
      });
    }
  }

  /// Finds the best of the two bins' swaps. `excess_of(tokens, attention)`: the higher excess after these net amounts
  /// went from `bin` to `other`.
  template <class ExcessOf>
  void try_lots(int32_t bin, int32_t other, const ExcessOf& excess_of) {
    const double free_here = packed_.free_tokens(bin);
    const double free_there = packed_.free_tokens(other);
    for (const Lot& given : given_) {
      for (const Lot& taken : taken_) {
        const double tokens = given.tokens - taken.tokens;
        const double then_s = excess_of(tokens, given.attention - taken.attention);
        if (then_s >= best_s_ || -tokens > free_here || tokens > free_there) continue;
        best_s_ = then_s;
        best_from_ = bin;
        best_bin_ = other;
        best_given_ = given;
        best_taken_ = taken;
      }
    }
  }

  void move(const Lot& lot, int32_t from, int32_t to) {
    for (const int32_t item : lot.items) {
      if (item < 0) continue;
      packed_.take_out(item, from);
      packed_.put(item, to);
    }
  }

  void swap() {
    move(best_given_, best_from_, best_bin_);
    move(best_taken_, best_bin_, best_from_);
    for (const int32_t swapped : {best_from_, best_bin_}) {
      const PackedBins::Group& group = packed_.groups[swapped];
      const double now_s = excess(swapped);
      for (int32_t b = group.first; b < group.first + group.size; ++b) {
        excess_s_[b] = now_s;
        if (is_settled_[packed_.micro_batch_of(b)] == 0) set_excess(b, now_s);
      }
    }
  }

  void settle(int32_t micro_batch) {
    is_settled_[micro_batch] = 1;
    --num_open_;
    const double above_s = max_excess_s();
    level_s_[micro_batch] += above_s;
    sum_s_ += above_s;
    const int32_t first = micro_batch * packed_.num_leaves();
    for (int32_t b = first; b < first + packed_.num_leaves(); ++b) {
      excess_s_[b] = excess(b);
      set_excess(b, -kInfinity);
    }
  }

  PackedBins& packed_;
  std::span<const double> levels_s_;
  std::vector<double> level_s_;
  std::vector<char> is_settled_;  // by micro-batch
  std::vector<double> excess_s_;  // by bin
  WinnerTree fullest_{1};         // by bin: the negated excess; infinite if the micro-batch is settled or not in use
  Random random_;
  std::vector<int32_t> bins_;  // of micro-batches that are in use
  double sum_s_ = 0;           // of the levels
  int32_t num_open_ = 0;       // micro-batches in use and not settled
  int64_t trials_left_ = 0;
  InterruptChecks checks_;
  std::vector<Lot> given_, taken_;
  int32_t best_from_ = -1, best_bin_ = -1;
  double best_s_ = 0;
  Lot best_given_, best_taken_;
};

}  // namespace

void swap_between_bins(PackedBins& bins, std::span<const double> levels_s, uint64_t seed, const SwapLimits& limits) {
  BinSwaps(bins, levels_s, seed).run(limits);
}

}  // namespace knapformer
