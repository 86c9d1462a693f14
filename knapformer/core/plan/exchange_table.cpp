#include "knapformer/core/plan/exchange_table.h"

#include <algorithm>
#include <numeric>

#include "knapformer/core/util/error.h"

namespace knapformer {
namespace {

struct PeerRun {
  int32_t peer = 0;
  RowRun run;
};

/// Makes an end of runs that are in wire order within each peer: sorts them by peer (stable), joins adjacent rows,
/// drops empty runs.
ExchangeEnd make_end(int64_t num_rows, int32_t num_peers, std::span<const PeerRun> peer_runs) {
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

/// Tokens of a sequence: [first, last).
struct TokenRange {
  int64_t first = 0, last = 0;

  static TokenRange queries_of(const QueryPart& part) {
    return {part.first_query, part.first_query + part.num_queries};
  }
  static TokenRange keys_of(const QueryPart& part) { return {part.first_key, part.first_key + part.num_keys}; }
  /// The tokens of both, as rows of the first, which begin at `row`.
  RowRun shared_with(const TokenRange& other, int64_t row) const {
    const int64_t begin = std::max(first, other.first), end = std::min(last, other.last);
    return {.first_row = row + begin - first, .num_rows = std::max<int64_t>(0, end - begin)};
  }
};

/// The two ends of one table of a level.
struct LevelRuns {
  std::vector<PeerRun> sent, received;
  std::vector<int64_t> received_lens;  // rows that come here, by sequence and chunk
  int64_t num_received = 0;

  /// The rows of a sequence that `parts` takes (queries_of, or keys_of), of each chunk one slice of several. chunk:
  /// this rank's, whose rows begin at `row`. Returns how many rows come here.
  int64_t add(const MicroBatchPlan& plan, const Bag& bag, const Chunk& chunk, int64_t row,
              std::span<const QueryPart> parts, TokenRange (*tokens_of)(const QueryPart&), int32_t slice = 0,
              int32_t num_slices = 1) {
    const std::span<const Chunk> chunks = plan.chunks(chunk.sequence);
    const auto head_parts = chunks.size() / parts.size();
    const auto slice_of = [&](const Chunk& of) {
      return TokenRange{of.first_token + of.num_tokens * slice / num_slices,
                        of.first_token + of.num_tokens * (slice + 1) / num_slices};
    };
    const TokenRange mine = slice_of(chunk);
    const TokenRange own = tokens_of(parts[static_cast<size_t>(&chunk - chunks.data()) / head_parts]);
    const int64_t before = num_received;
    for (size_t i = 0; i < chunks.size(); ++i) {
      const int32_t peer = chunks[i].rank.value - bag.first_rank.value;
      const RowRun out = mine.shared_with(tokens_of(parts[i / head_parts]), row + mine.first - chunk.first_token);
      const int64_t num_in = own.shared_with(slice_of(chunks[i]), 0).num_rows;
      sent.push_back({.peer = peer, .run = out});
      received.push_back({.peer = peer, .run = {.first_row = num_received, .num_rows = num_in}});
      received_lens.push_back(num_in);
      num_received += num_in;
    }
    return num_received - before;
  }
};

AttentionLevel make_level(const MicroBatchPlan& plan, const Bag& bag, Rank rank, int32_t degree,
                          std::span<const int32_t> chunks, int64_t first_row) {
  const int32_t index_in_bag = rank.value - bag.first_rank.value;
  AttentionLevel level;
  level.degree = degree;
  level.index_in_group = index_in_bag % degree;
  const AttentionCut cut = plan.input().attention_cut(degree);
  level.query_parts = cut.num_parts;
  level.first_row = first_row;
  LevelRuns queries;
  std::vector<LevelRuns> keys(level.cuts_queries() ? static_cast<size_t>(cut.num_stages) : 0);
  level.stages.resize(keys.size());
  for (const int32_t index : chunks) {
    const Chunk& chunk = plan.chunk(index);
    const std::vector<QueryPart> parts = plan.query_parts(chunk.sequence);
    level.sequences.push_back(parts[level.index_in_group / level.head_parts()]);
    level.sequence_ids.push_back(chunk.sequence);
    if (degree > 1) queries.add(plan, bag, chunk, level.num_rows, parts, &TokenRange::queries_of);
    for (size_t s = 0; s < keys.size(); ++s) {
      level.stages[s].key_lens.push_back(keys[s].add(plan, bag, chunk, level.num_rows, parts, &TokenRange::keys_of,
                                                     static_cast<int32_t>(s), cut.num_stages));
    }
    level.num_rows += chunk.num_tokens;
  }
  const auto table_of = [&](const LevelRuns& runs) {
    ExchangeTable table{.this_peer = index_in_bag,
                        .num_peers = bag.num_ranks,
                        .send = make_end(level.num_rows, bag.num_ranks, runs.sent),
                        .recv = make_end(runs.num_received, bag.num_ranks, runs.received)};
    table.send.heads_shared = true;
    table.send.all_rows = !level.cuts_queries();
    return table;
  };
  if (degree > 1) level.queries = table_of(queries);
  for (size_t s = 0; s < keys.size(); ++s) {
    level.stages[s].keys = table_of(keys[s]);
    level.stages[s].slice_lens = std::move(keys[s].received_lens);
    level.stages[s].keys.send.has_duplicate_rows = true;
  }
  return level;
}

}  // namespace

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

AttentionTables make_attention_tables(const MicroBatchPlan& plan, Rank rank) {
  AttentionTables tables{.bag = plan.topology().bag_of(rank), .levels = {}, .any_shared = false};
  const Bag& bag = plan.topology().bag(tables.bag);
  const std::span<const int32_t> chunks = plan.chunks_on(rank);  // by degree
  size_t next = 0;
  int64_t first_row = 0;
  for (const int32_t degree : plan.topology().shapes()[bag.shape].degrees) {
    const size_t begin = next;
    while (next < chunks.size() && plan.degree_of(plan.chunk(chunks[next])) == degree) ++next;
    tables.levels.push_back(make_level(plan, bag, rank, degree, chunks.subspan(begin, next - begin), first_row));
    first_row += tables.levels.back().num_rows;
  }
  KNAPFORMER_ASSERT(next == chunks.size());
  for (int32_t i = 0; i < bag.num_ranks; ++i) {
    for (const int32_t index : plan.chunks_on(Rank(bag.first_rank.value + i)))
      tables.any_shared = tables.any_shared || plan.degree_of(plan.chunk(index)) > 1;
  }
  return tables;
}

}  // namespace knapformer
