#include "knapformer/core/plan/lengths.h"

#include "knapformer/core/util/error.h"

namespace knapformer {

SequenceLengths::SequenceLengths(std::vector<int64_t> lens, std::span<const int64_t> counts, int32_t first_rank) {
  lens_.offsets.reserve(counts.size() + 1);
  homes_.resize(lens.size());
  size_t next = 0;
  for (size_t rank = 0; rank < counts.size(); ++rank) {
    if (counts[rank] < 0 || static_cast<size_t>(counts[rank]) > lens.size() - next) {
      throw_argument("seq_lens", text(counts[rank], " sequences for rank ", first_rank + static_cast<int32_t>(rank)),
                     text("counts of at least 0 that add up to the ", lens.size(), " lengths"));
    }
    for (int64_t i = 0; i < counts[rank]; ++i, ++next) {
      if (lens[next] < 1 || lens[next] > kMaxSequenceTokens) {
        throw_argument("seq_lens",
                       text(lens[next], " for sequence ", i, " of rank ", first_rank + static_cast<int32_t>(rank)),
                       text("a length of 1 to ", kMaxSequenceTokens, " tokens"));
      }
      homes_[next] = Rank(rank);
    }
    lens_.offsets.push_back(static_cast<int32_t>(next));
  }
  if (next != lens.size()) {
    throw_argument("seq_lens", text("counts that add up to ", next),
                   text("counts that add up to the ", lens.size(), " lengths"));
  }
  lens_.values = std::move(lens);
}

SequenceLengths SequenceLengths::from_lists(const std::vector<std::vector<int64_t>>& per_rank) {
  std::vector<int64_t> lens, counts;
  counts.reserve(per_rank.size());
  for (const auto& list : per_rank) {
    lens.insert(lens.end(), list.begin(), list.end());
    counts.push_back(static_cast<int64_t>(list.size()));
  }
  return SequenceLengths(std::move(lens), counts);
}

}  // namespace knapformer
