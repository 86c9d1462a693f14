#include "knapformer/core/plan/exchange_table.h"

#include <algorithm>
#include <numeric>

namespace knapformer {

ExchangeEnd make_end(int64_t num_rows, int32_t num_peers, const std::vector<PeerRun>& peer_runs) {
  ExchangeEnd end{.num_rows = num_rows, .runs = {}, .peer_rows = std::vector<int64_t>(static_cast<size_t>(num_peers))};
  const Ragged<int32_t> by_peer =
      grouped(num_peers, static_cast<int32_t>(peer_runs.size()), [&](int32_t i) { return peer_runs[i].peer; });
  std::vector<RowRun>& runs = end.runs.values;
  runs.reserve(peer_runs.size());
  for (int32_t peer = 0; peer < num_peers; ++peer) {
    for (const int32_t i : by_peer.of(peer)) {
      const RowRun& run = peer_runs[i].run;
      if (run.num_rows == 0) continue;
      end.peer_rows[peer] += run.num_rows;
      const bool is_first = std::ssize(runs) == end.runs.offsets.back();
      if (!is_first && runs.back().first_row + runs.back().num_rows == run.first_row) {
        runs.back().num_rows += run.num_rows;
      } else {
        runs.push_back(run);
      }
    }
    end.runs.end_list();
  }
  return end;
}

RouteTables make_route_tables(const MicroBatchPlan& plan, Rank rank) {
  const SequenceLengths& lens = plan.seq_lens();
  RouteTables tables;
  tables.tokens.this_peer = tables.sequences.this_peer = rank.value;
  tables.tokens.num_peers = tables.sequences.num_peers = plan.num_ranks();

  // What leaves: the chunks of this rank's sequences, in sequence order.
  std::vector<PeerRun> tokens, sequences;
  const SequenceId first = lens.first_of(rank), last = lens.last_of(rank);
  int64_t row = 0;
  bool shared = false;
  for (int32_t s = first.value; s < last.value; ++s) {
    for (const Chunk& chunk : plan.chunks(SequenceId(s))) {
      tokens.push_back({.peer = chunk.rank.value, .run = {.first_row = row, .num_rows = chunk.num_tokens}});
      sequences.push_back({.peer = chunk.rank.value, .run = {.first_row = s - first.value, .num_rows = 1}});
      row += chunk.num_tokens;
    }
    shared = shared || plan.placement(SequenceId(s)).degree > 1;
  }
  tables.tokens.send = make_end(row, plan.num_ranks(), tokens);
  tables.sequences.send = make_end(last.value - first.value, plan.num_ranks(), sequences);
  tables.sequences.send.has_duplicate_rows = shared;

  // What comes: this rank's chunks. Their rows are in the order of chunks_on. The wire is in sequence order, which is
  // the order of chunk indices and so also of home ranks.
  const std::span<const int32_t> held = plan.chunks_on(rank);
  std::vector<int64_t> first_rows;
  row = 0;
  for (const int32_t index : held) {
    first_rows.push_back(row);
    tables.chunk_lens.push_back(plan.chunk(index).num_tokens);
    row += plan.chunk(index).num_tokens;
  }
  std::vector<int32_t> wire_order(held.size());
  std::iota(wire_order.begin(), wire_order.end(), 0);
  std::ranges::sort(wire_order, {}, [&](int32_t i) { return held[i]; });
  tokens.clear();
  sequences.clear();
  for (const int32_t i : wire_order) {
    const Chunk& chunk = plan.chunk(held[i]);
    const int32_t home = lens.home_of(chunk.sequence).value;
    tokens.push_back({.peer = home, .run = {.first_row = first_rows[i], .num_rows = chunk.num_tokens}});
    sequences.push_back({.peer = home, .run = {.first_row = i, .num_rows = 1}});
  }
  tables.tokens.recv = make_end(row, plan.num_ranks(), tokens);
  tables.sequences.recv = make_end(static_cast<int64_t>(held.size()), plan.num_ranks(), sequences);
  return tables;
}

}  // namespace knapformer
