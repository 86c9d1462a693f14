// Lengths: the tokens of every rank's sequences. Apart from masks and given work, a planner knows nothing else of the
// data.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "knapformer/core/util/ids.h"
#include "knapformer/core/util/ragged.h"

namespace knapformer {

/// The lengths (tokens, each at least 1) of the sequences of all ranks: flat, those of rank 0 first.
class SequenceLengths {
 public:
  SequenceLengths() = default;
  /// `counts[r]` sequences live on rank r. Throws ArgumentError (argument "seq_lens") for a length below 1 or above
  /// kMaxSequenceTokens, or counts that do not add up. first_rank: the number that messages give the first rank.
  SequenceLengths(std::vector<int64_t> lens, std::span<const int64_t> counts, int32_t first_rank = 0);
  static SequenceLengths from_lists(const std::vector<std::vector<int64_t>>& per_rank);

  /// Attention kernels take lengths of 32 bits.
  static constexpr int64_t kMaxSequenceTokens = std::numeric_limits<int32_t>::max();

  int32_t num_ranks() const { return lens_.size(); }
  int32_t num_sequences() const { return static_cast<int32_t>(homes_.size()); }
  int64_t operator[](SequenceId id) const { return lens_.values[id.index()]; }
  std::span<const int64_t> lens() const { return lens_.values; }
  std::span<const int64_t> lens(Rank home) const { return lens_.of(home.value); }
  /// Ids of the sequences of `home`: [first, last).
  SequenceId first_of(Rank home) const { return SequenceId(lens_.offsets[home.index()]); }
  SequenceId last_of(Rank home) const { return SequenceId(lens_.offsets[home.index() + 1]); }
  Rank home_of(SequenceId id) const { return homes_[id.index()]; }

  bool operator==(const SequenceLengths&) const = default;

 private:
  Ragged<int64_t> lens_;  // by home
  std::vector<Rank> homes_;
};

}  // namespace knapformer
