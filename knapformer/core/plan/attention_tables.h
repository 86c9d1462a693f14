// The exchange tables of attention: which rows the ranks of a bag exchange at each degree of sharing.
#pragma once

#include <cstdint>
#include <vector>

#include "knapformer/core/plan/exchange_table.h"

namespace knapformer {

/// One degree of sharing in this rank's bag.
struct AttentionLevel : HeadSharing {
  int64_t first_row = 0;  // this level's rows on this rank are consecutive
  int64_t num_rows = 0;
  /// What attention sees, in this order: of each sequence the queries of this rank's part, and the keys for them.
  std::vector<QueryPart> sequences;
  std::vector<SequenceId> sequence_ids;  // of the same
  /// From this level's rows here to the rows of `sequences`: of queries; and of keys and values, by stage. Where
  /// queries are not cut, `queries` moves all three, and there are no stages. Peers are the ranks of the bag. Rows are
  /// counted from first_row. Degree 1 needs no exchange and its tables are empty.
  ExchangeTable queries;
  struct Stage {
    ExchangeTable keys;
    std::vector<int64_t> key_lens;    // of each sequence: those that come in this stage, a slice of every chunk
    std::vector<int64_t> slice_lens;  // the same by sequence and chunk
  };
  std::vector<Stage> stages;

  bool cuts_queries() const { return query_parts > 1; }
  /// Whether this rank has queries to attend with.
  bool has_queries() const { return degree == 1 ? !sequences.empty() : queries.recv.num_rows > 0; }
};

struct AttentionTables {
  BagId bag;
  /// Every degree that the bag allows, ascending, with sequences or without: all ranks of a bag have the same levels.
  std::vector<AttentionLevel> levels;
  /// Whether some rank of the bag holds a part of a shared sequence. All ranks of the bag know this.
  bool any_shared = false;
};

AttentionTables make_attention_tables(const MicroBatchPlan& plan, Rank rank);

}  // namespace knapformer
