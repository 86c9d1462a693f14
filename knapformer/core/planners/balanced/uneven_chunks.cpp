#include "knapformer/core/planners/balanced/uneven_chunks.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "knapformer/core/util/error.h"
#include "knapformer/core/util/ragged.h"

namespace knapformer {
namespace {

/// Levels are times, measured in tokens that the bag's fastest rank handles; in finer steps if speeds differ.
/// kHighestLevel keeps levels far from overflow, at the price of coarser steps if there are very many tokens.
constexpr double kLevelsPerToken = 1024, kHighestLevel = 0x1p60;

class BagChunks {
 public:
  BagChunks(const PlanInput& input, std::span<const Placement> placements, std::span<const int64_t> chunk_offsets,
            std::span<int64_t> chunk_lens)
      : input_(input), placements_(placements), chunk_offsets_(chunk_offsets), chunk_lens_(chunk_lens) {}

  /// `ids`: the bag's sequences, in any order that is the same everywhere.
  void cut(const Bag& bag, std::span<const int32_t> degrees, std::vector<int32_t> ids) {
    first_rank_ = bag.first_rank.value;
    const auto num_ranks = static_cast<size_t>(bag.num_ranks);
    tokens_.assign(num_ranks, 0);
    rooms_.assign(num_ranks, 0);
    group_tokens_.clear();
    for (const int32_t degree : degrees) group_tokens_.emplace_back(num_ranks / static_cast<size_t>(degree), 0);
    for (const int32_t id : ids) {
      const Placement& place = placements_[id];
      const auto k = std::ranges::find(degrees, place.degree) - degrees.begin();
      group_tokens_[k][(place.first_rank.value - first_rank_) / place.degree] += input_.seq_lens[SequenceId(id)];
    }
    set_levels(bag);
    set_rooms(degrees);
    // Small groups first: how much room a group needs does not depend on how the smaller groups inside it were filled,
    // and larger groups take the room that is left.
    const auto group_of = [&](int32_t id) { return std::pair(placements_[id].degree, placements_[id].first_rank); };
    std::ranges::stable_sort(ids, {}, group_of);
    for (auto first = ids.begin(), last = first; first != ids.end(); first = last) {
      last = std::find_if(first, ids.end(), [&](int32_t id) { return group_of(id) != group_of(*first); });
      fill(placements_[*first], {first, last});
    }
  }

 private:
  void set_levels(const Bag& bag) {
    bag_tokens_ = 0;
    for (const auto& groups : group_tokens_) bag_tokens_ += std::accumulate(groups.begin(), groups.end(), int64_t{0});
    speeds_.clear();
    for (int32_t i = 0; i < bag.num_ranks; ++i) speeds_.push_back(input_.speed_of(Rank(first_rank_ + i)));
    const double fastest = *std::max_element(speeds_.begin(), speeds_.end());
    for (double& speed : speeds_) speed /= fastest;
    const double slowest = *std::min_element(speeds_.begin(), speeds_.end());
    levels_per_token_ =
        slowest == 1 ? 1 : std::min(kLevelsPerToken, kHighestLevel * slowest / (static_cast<double>(bag_tokens_) + 1));
  }

  /// Tokens that the rank handles up to this level, at most the bag's tokens.
  int64_t tokens_at(int64_t level, size_t rank) const {
    const double tokens = static_cast<double>(level) / levels_per_token_ * speeds_[rank];
    return tokens < static_cast<double>(bag_tokens_) ? static_cast<int64_t>(tokens) : bag_tokens_;
  }
  int64_t room_at(int64_t level, size_t rank) const {
    const int64_t tokens = tokens_at(level, rank);
    return input_.max_tokens_per_rank > 0 ? std::min(tokens, input_.max_tokens_per_rank) : tokens;
  }

  /// Sets the most tokens that each rank that shares may hold: its room at the lowest level at which every group's
  /// tokens fit its ranks.
  void set_rooms(std::span<const int32_t> degrees) {
    // Tokens of each group, with those of the groups inside it.
    std::vector<std::vector<int64_t>> below = group_tokens_;
    for (size_t k = 1; k < degrees.size(); ++k) {
      const auto ratio = static_cast<size_t>(degrees[k] / degrees[k - 1]);
      for (size_t group = 0; group < below[k - 1].size(); ++group) below[k][group / ratio] += below[k - 1][group];
    }
    // A connected group is the largest group with tokens. A rank that is in none is alone, and holds only whole
    // sequences.
    for (size_t r = 0, size; r < rooms_.size(); r += size) {
      size_t top = 0;
      for (size_t k = 0; k < degrees.size(); ++k) {
        if (group_tokens_[k][r / static_cast<size_t>(degrees[k])] > 0) top = k;
      }
      size = static_cast<size_t>(degrees[top]);
      if (size == 1) continue;
      const auto fits = [&](int64_t level) {
        for (size_t k = 0; k <= top; ++k) {
          const auto degree = static_cast<size_t>(degrees[k]);
          for (size_t group = r / degree; group < (r + size) / degree; ++group) {
            int64_t room = 0;
            // Stops at what is needed, so that no sum overflows.
            for (size_t i = group * degree; i < (group + 1) * degree && room < below[k][group]; ++i)
              room += room_at(level, i);
            if (room < below[k][group]) return false;
          }
        }
        return true;
      };
      const double slowest = *std::min_element(&speeds_[r], &speeds_[r] + size);
      int64_t low = -1;  // does not fit
      auto high =
          static_cast<int64_t>(std::ceil(static_cast<double>(below[top][r / size] + 1) / slowest * levels_per_token_));
      if (fits(high)) {
        while (high - low > 1) {
          const int64_t middle = low + (high - low) / 2;
          (fits(middle) ? high : low) = middle;
        }
        for (size_t i = r; i < r + size; ++i) rooms_[i] = room_at(high, i);
      } else {  // the limit of tokens cannot be kept: the caller reports it
        std::fill_n(rooms_.begin() + static_cast<std::ptrdiff_t>(r), size, bag_tokens_);
      }
    }
  }

  /// Spreads the sequences of one group over its ranks: the emptiest first, within their rooms.
  void fill(const Placement& group, std::span<const int32_t> ids) {
    const auto first = static_cast<size_t>(group.first_rank.value - first_rank_);
    const auto size = static_cast<size_t>(group.degree);
    int64_t tokens = 0;
    for (const int32_t id : ids) tokens += input_.seq_lens[SequenceId(id)];
    if (size == 1) {
      tokens_[first] += tokens;
      for (const int32_t id : ids) chunk_lens_[chunk_offsets_[id]] = input_.seq_lens[SequenceId(id)];
      return;
    }
    const auto share_at = [&](int64_t level, size_t i) {
      return std::max<int64_t>(0, std::min(tokens_at(level, i), rooms_[i]) - tokens_[i]);
    };
    const auto sum_at = [&](int64_t level) {
      int64_t sum = 0;
      for (size_t i = first; i < first + size && sum < tokens; ++i) sum += share_at(level, i);
      return sum;
    };
    int64_t low = 0, high = 1;
    while (sum_at(high) < tokens) high *= 2;
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      (sum_at(middle) >= tokens ? high : low) = middle;
    }
    shares_.assign(size, 0);
    int64_t excess = -tokens;
    for (size_t i = 0; i < size; ++i) excess += shares_[i] = share_at(high, first + i);
    for (size_t i = size; i-- > 0 && excess > 0;) {
      const int64_t back = std::min(excess, shares_[i] - share_at(high - 1, first + i));
      shares_[i] -= back;
      excess -= back;
    }
    KNAPFORMER_ASSERT(excess == 0);
    for (size_t i = 0; i < size; ++i) tokens_[first + i] += shares_[i];
    // Each sequence gets its part of every rank's share; the tokens left by rounding go to the ranks in turn.
    int64_t left = tokens;
    size_t turn = 0;
    for (const int32_t id : ids) {
      const int64_t length = input_.seq_lens[SequenceId(id)];
      int64_t* lens = &chunk_lens_[chunk_offsets_[id]];
      int64_t given = 0;
      for (size_t i = 0; i < size; ++i) {
        const double part = static_cast<double>(length) * static_cast<double>(shares_[i]) / static_cast<double>(left);
        lens[i] = std::min({static_cast<int64_t>(std::floor(part)), shares_[i], length - given});
        given += lens[i];
      }
      for (; given < length; turn = (turn + 1) % size) {
        if (lens[turn] < shares_[turn]) {
          ++lens[turn];
          ++given;
        }
      }
      for (size_t i = 0; i < size; ++i) shares_[i] -= lens[i];
      left -= length;
    }
  }

  const PlanInput& input_;
  std::span<const Placement> placements_;
  std::span<const int64_t> chunk_offsets_;
  std::span<int64_t> chunk_lens_;
  int32_t first_rank_ = 0;
  int64_t bag_tokens_ = 0;
  std::vector<double> speeds_;  // of each rank of the bag, the fastest 1
  double levels_per_token_ = 1;
  std::vector<int64_t> tokens_;  // of each rank of the bag, so far
  std::vector<int64_t> rooms_;
  std::vector<std::vector<int64_t>> group_tokens_;  // by degree, then group
  std::vector<int64_t> shares_;
};

}  // namespace

std::vector<int64_t> uneven_chunk_lens(const PlanInput& input, std::span<const Placement> placements) {
  std::vector<int64_t> chunk_offsets = {0};
  for (const Placement& place : placements) chunk_offsets.push_back(chunk_offsets.back() + place.degree);
  const auto num_bags = static_cast<int32_t>(input.topology.bags().size());
  const Ragged<int32_t> by_bag =
      grouped(num_bags, static_cast<int32_t>(placements.size()), [&](int32_t s) { return placements[s].bag.value; });
  std::vector<int64_t> chunk_lens(static_cast<size_t>(chunk_offsets.back()), 0);
  BagChunks cutter(input, placements, chunk_offsets, chunk_lens);
  for (int32_t b = 0; b < num_bags; ++b) {
    const Bag& bag = input.topology.bag(BagId(b));
    const std::span<const int32_t> in_bag = by_bag.of(b);
    cutter.cut(bag, input.topology.shapes()[bag.shape].degrees, {in_bag.begin(), in_bag.end()});
  }
  return chunk_lens;
}

}  // namespace knapformer
