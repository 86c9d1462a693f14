// Cuts the queries of a sequence into parts with equally many pairs (Mask::query_parts).
#include <algorithm>
#include <span>

#include "knapformer/core/model/mask.h"

namespace knapformer {
namespace {

/// The run of keys that holds all which these queries see. `first_run`: one before them, or theirs; then the last one
/// of theirs. `queries`: before each run.
QueryPart part_of(std::span<const MaskRun> runs, std::span<const int64_t> queries, int64_t first, int64_t end,
                  size_t& first_run) {
  int64_t first_key = queries.back(), end_key = 0;
  for (size_t& run = first_run; run < runs.size() && queries[run] < end; ++run) {
    const int64_t from = std::max(first, queries[run]) - queries[run],
                  to = std::min(end, queries[run + 1]) - queries[run];
    if (!runs[run].keys.empty()) {
      first_key = std::min(first_key, runs[run].part(from, 1).keys.front().first);
      end_key = std::max({end_key, runs[run].part(from, 1).keys.back().end, runs[run].part(to - 1, 1).keys.back().end});
    }
    if (end < queries[run + 1]) break;  // the next part begins in this run
  }
  const bool any = end > first && end_key > first_key;
  return {.first_query = first,
          .num_queries = end - first,
          .first_key = any ? first_key : first,
          .num_keys = any ? end_key - first_key : 0};
}

}  // namespace

std::vector<QueryPart> Mask::query_parts(int64_t seq_len, int32_t num_parts) const {
  if (num_parts == 1) return {{.first_query = 0, .num_queries = seq_len, .first_key = 0, .num_keys = seq_len}};
  const std::vector<MaskRun> all = runs(seq_len);
  std::vector<int64_t> queries = {0}, pairs = {0};  // before each run, and in all
  for (const MaskRun& run : all) {
    queries.push_back(queries.back() + run.num_queries);
    pairs.push_back(pairs.back() + run.pairs_before(run.num_queries));
  }
  /// The fewest queries with so many pairs.
  const auto queries_with = [&](int64_t target) {
    const auto run = static_cast<size_t>(std::ranges::lower_bound(pairs, target) - pairs.begin());
    if (run == 0) return int64_t{0};
    int64_t low = 0, high = all[run - 1].num_queries;
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      (pairs[run - 1] + all[run - 1].pairs_before(middle) >= target ? high : low) = middle;
    }
    return queries[run - 1] + high;
  };
  std::vector<QueryPart> parts;
  parts.reserve(static_cast<size_t>(num_parts));
  size_t run = 0;
  for (int64_t j = 1, first = 0; j <= num_parts; ++j) {
    const int64_t total = pairs.back(), target = total / num_parts * j + total % num_parts * j / num_parts;
    int64_t end = seq_len;
    if (j < num_parts) end = total > 0 ? queries_with(target) : seq_len * j / num_parts;  // no pairs: evenly
    parts.push_back(part_of(all, queries, first, end, run));
    first = end;
  }
  return parts;
}

}  // namespace knapformer
