#include "knapformer/core/plan/mask_rows.h"

#include <algorithm>

#include "knapformer/core/util/error.h"

namespace knapformer {
namespace {

void check(const Mask& mask) {
  if (mask.kind != Mask::Kind::kDensity) return;
  throw_argument("mask", text("'", mask.str(), "'"),
                 "a mask that says which keys a query sees, or a kernel (attend) that applies it");
}

}  // namespace

void MaskRows::add(const Mask& mask, int64_t seq_len, const QueryPart& part) {
  check(mask);
  int64_t first = 0;
  for (const MaskRun& run : mask.runs(seq_len)) {
    const int64_t begin = std::max(first, part.first_query);
    const int64_t end = std::min(first + run.num_queries, part.first_query + part.num_queries);
    if (begin < end) {
      MaskRun& own = runs.emplace_back(run.part(begin - first, end - begin));
      for (KeyRange& range : own.keys) {
        range.first += num_keys - part.first_key;
        range.end += num_keys - part.first_key;
      }
    }
    first += run.num_queries;
  }
  num_queries += part.num_queries;
  num_keys += part.num_keys;
}

MaskRows MaskRows::of(const MicroBatchPlan& plan, const AttentionLevel& level) {
  MaskRows rows;
  for (size_t s = 0; s < level.sequences.size(); ++s) {
    const SequenceId id = level.sequence_ids[s];
    rows.add(plan.input().mask_of(id), plan.seq_lens()[id], level.sequences[s]);
  }
  return rows;
}

void check_masks_run(const PlanInput& input) { std::ranges::for_each(input.masks, check); }

size_t MaskRows::max_ranges() const {
  size_t most = 0;
  for (const MaskRun& run : runs) most = std::max(most, run.keys.size());
  return most;
}

MaskBlocks MaskBlocks::of(const MaskRows& rows, int64_t block_size) {
  const auto num_blocks = [&](int64_t num_rows) {
    return static_cast<size_t>((num_rows + block_size - 1) / block_size);
  };
  const size_t num_query_blocks = num_blocks(rows.num_queries), num_key_blocks = num_blocks(rows.num_keys);
  MaskBlocks blocks{.some_keys = {num_query_blocks, num_key_blocks},
                    .all_keys = {num_query_blocks, num_key_blocks},
                    .some_queries = {num_key_blocks, num_query_blocks},
                    .all_queries = {num_key_blocks, num_query_blocks}};
  // Of the blocks of keys, for one block of queries: the pairs that are surely seen; -1: none.
  std::vector<int64_t> pairs(num_key_blocks, -1);
  std::vector<size_t> touched;
  auto run = rows.runs.begin();
  int64_t first_of_run = 0;
  for (size_t q = 0; q < num_query_blocks; ++q) {
    const int64_t end = std::min(rows.num_queries, static_cast<int64_t>(q + 1) * block_size);
    for (int64_t query = static_cast<int64_t>(q) * block_size; query < end;) {
      const int64_t count = std::min(end, first_of_run + run->num_queries) - query;
      for (const KeyRange& range : run->part(query - first_of_run, count).keys) {
        const int64_t moved = count - 1;
        const int64_t last_end = range.end + (range.end_moves ? moved : 0);
        const int64_t all_first = range.first + (range.first_moves ? moved : 0);  // all of them see [this, range.end)
        for (auto k = static_cast<size_t>(range.first / block_size); static_cast<int64_t>(k) * block_size < last_end;
             ++k) {
          const int64_t first_key = static_cast<int64_t>(k) * block_size, end_key = first_key + block_size;
          if (pairs[k] < 0) {
            pairs[k] = 0;
            touched.push_back(k);
          }
          pairs[k] += count * std::max<int64_t>(0, std::min(range.end, end_key) - std::max(all_first, first_key));
        }
      }
      query += count;
      if (query == first_of_run + run->num_queries) first_of_run += (run++)->num_queries;
    }
    std::ranges::sort(touched);
    for (const size_t k : touched) {
      const bool sees_all = pairs[k] == block_size * block_size;
      (sees_all ? blocks.all_keys : blocks.some_keys).add(q, k);
      (sees_all ? blocks.all_queries : blocks.some_queries).add(k, q);
      pairs[k] = -1;
    }
    touched.clear();
  }
  return blocks;
}

}  // namespace knapformer
