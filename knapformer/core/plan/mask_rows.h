// Which packed keys each packed query of attention sees, by the masks of their sequences: for kernels.
#pragma once

#include <cstdint>
#include <vector>

#include "knapformer/core/plan/attention_tables.h"

namespace knapformer {

/// Sequences lie one after another, of each the queries of a part and the keys for them.
struct MaskRows {
  int64_t num_queries = 0, num_keys = 0;
  std::vector<MaskRun> runs;  // of all queries; keys are rows of the packed keys

  /// Appends a part of a sequence. Throws ArgumentError (argument "mask") for a density, which says of no pair whether
  /// it is seen, and for a mask of another length.
  void add(const Mask& mask, int64_t seq_len, const QueryPart& part);
  /// What attention sees at a level. For a plan that passes check_masks_run.
  static MaskRows of(const MicroBatchPlan& plan, const AttentionLevel& level);

  /// The most ranges of keys that a query sees.
  size_t max_ranges() const;
};

/// Throws ArgumentError (argument "mask") where the mask of any sequence says of no pair whether it is seen: a density.
/// For a step it is called once, and throws on all ranks.
void check_masks_run(const PlanInput& input);

/// By block of queries the blocks of keys of which it sees some pairs; or by block of keys those of queries.
struct BlockLists {
  std::vector<int32_t> counts;   // for each block
  std::vector<int32_t> indices;  // for each block as many as there are blocks on the other side, `counts` of them used

  BlockLists(size_t num_blocks, size_t num_others) : counts(num_blocks), indices(num_blocks * num_others) {}
  void add(size_t block, size_t other) {
    const size_t first = block * (indices.size() / counts.size());
    indices[first + static_cast<size_t>(counts[block]++)] = static_cast<int32_t>(other);
  }
};

/// The form in which block-sparse kernels (FlexAttention) want a mask.
struct MaskBlocks {
  BlockLists some_keys, all_keys;        // of a block of queries: blocks seen in part, and whole
  BlockLists some_queries, all_queries;  // the same pairs of blocks, by block of keys

  static MaskBlocks of(const MaskRows& rows, int64_t block_size);
};

}  // namespace knapformer
