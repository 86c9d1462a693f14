#include "knapformer/core/plan/attention_tables.h"

#include <algorithm>

#include "knapformer/core/util/error.h"

namespace knapformer {
namespace {

/// Tokens of a sequence: [first, last).
struct TokenRange {
  int64_t first = 0, last = 0;

  static TokenRange queries_of(const QueryPart& of) { return {of.first_query, of.first_query + of.num_queries}; }
  static TokenRange keys_of(const QueryPart& of) { return {of.first_key, of.first_key + of.num_keys}; }
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
