// Exchange tables: who sends which rows where.
//
// Everything that moves is an Exchange: gather rows of this rank's tensor in an order known from the plan, run one
// all-to-all with known splits, and scatter what arrives in an order known from the plan. An ExchangeTable is one
// rank's part of an exchange, built once a step by torch-free code. The inverse table swaps the two ends: it runs the
// exchange in the other direction, which is also the gradient.
//
//         send                       wire                         recv
//   rows  0 1 2 3 4 5      to peer 0: 0 1          from peer 0: 3 4        rows  0 1 2 3 4
//         `-' `---' |      to peer 1: 2 3 4        from peer 1: 0 1 2            `---' `-'
//         p0   p1   p0              (peer 0: 5)                                   p1   p0
//
// On the wire the rows for one peer are in sequence order, at both ends. Rows that a rank sends to itself are in the
// table like all others; they need not enter the all-to-all.
//
// There are two kinds of ends. A *whole* end exchanges its rows with all their columns (heads). A *shared* end
// exchanges with peer p only p's share of the heads. Before attention the sending end is shared and the receiving one
// whole; after it the inverse table moves the output.
#pragma once

#include <cstdint>
#include <vector>

#include "knapformer/core/plan/micro_batch_plan.h"
#include "knapformer/core/util/ragged.h"

namespace knapformer {

/// Consecutive rows of a tensor, which are also consecutive on the wire.
struct RowRun {
  int64_t first_row = 0;
  int64_t num_rows = 0;

  bool operator==(const RowRun&) const = default;
};

struct ExchangeEnd {
  /// Rows of the tensor at this end.
  int64_t num_rows = 0;
  /// In wire order: by peer, then by sequence. No run is empty; adjacent runs are joined.
  Ragged<RowRun> runs;
  /// Rows per peer: the all-to-all's splits.
  std::vector<int64_t> peer_rows;
  /// Whether this end exchanges with each peer only that peer's share of the heads (see above).
  bool heads_shared = false;
  /// Whether, in any plan, each peer of a shared end meets all rows in order, or none.
  bool all_rows = false;
  /// Whether some row goes to several peers with the same columns. Where this end receives (in a backward), such rows
  /// add up.
  bool has_duplicate_rows = false;
};

struct ExchangeTable {
  int32_t this_peer = 0;  // this rank, counted inside the group
  int32_t num_peers = 1;
  ExchangeEnd send;
  ExchangeEnd recv;
};

/// Peers are all ranks of the plan's group.
struct RouteTables {
  /// Rows: tokens of this rank's sequences -> tokens of the chunks it holds. reverse_route is the inverse.
  ExchangeTable tokens;
  /// Rows: one per sequence of this rank -> one per chunk that it holds. A row goes to every rank that holds a chunk of
  /// the sequence, so its gradient is a sum.
  ExchangeTable sequences;
  std::vector<int64_t> chunk_lens;  // tokens of the chunks that this rank holds, in row order
};

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
  /// Every degree that the bag allows, ascending, also degrees without sequences: all ranks of a bag have the same
  /// levels.
  std::vector<AttentionLevel> levels;
  /// Whether some rank of the bag holds a part of a shared sequence. All ranks of the bag know this.
  bool any_shared = false;
};

RouteTables make_route_tables(const MicroBatchPlan& plan, Rank rank);
AttentionTables make_attention_tables(const MicroBatchPlan& plan, Rank rank);

}  // namespace knapformer
