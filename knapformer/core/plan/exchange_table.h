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

/// Rows that meet one peer, before they are brought into wire order.
struct PeerRun {
  int32_t peer = 0;
  RowRun run;
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

/// Of runs in wire order within each peer: sorts them by peer (stable), joins adjacent rows, drops empty runs.
ExchangeEnd make_end(int64_t num_rows, int32_t num_peers, const std::vector<PeerRun>& peer_runs);
RouteTables make_route_tables(const MicroBatchPlan& plan, Rank rank);

}  // namespace knapformer
