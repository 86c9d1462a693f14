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

/// Says at an end who has no rows there. travel, stay: for each peer, whether it has such rows.
void set_peers_without_rows(ExchangeEnd& end, int32_t this_peer, const std::vector<bool>& travel,
                            const std::vector<bool>& stay) {
  const auto first = std::ranges::find(travel, true);
  end.speaker = first == travel.end() ? 0 : static_cast<int32_t>(first - travel.begin());
  end.without_rows = end.without_any_rows = {};
  for (int32_t peer = 0; peer < static_cast<int32_t>(travel.size()); ++peer) {
    if (travel[peer] || peer == end.speaker) continue;
    ++end.without_rows.num;
    end.without_rows.this_peer |= peer == this_peer;
    if (stay[peer]) continue;
    ++end.without_any_rows.num;
    end.without_any_rows.this_peer |= peer == this_peer;
  }
}

/// Who in the bag has rows of chunks, and who of whole sequences; in both cases, of those that travel or stay.
struct RowsInBag {
  explicit RowsInBag(const Plan& plan, const Bag& bag) {
    const auto num_ranks = static_cast<size_t>(bag.num_ranks);
    for (std::vector<bool>* of : {&chunks, &chunks_stay, &sequences, &sequences_stay}) of->assign(num_ranks, false);
    for (size_t i = 0; i < num_ranks; ++i) {
      for (const int32_t index : plan.chunks_on(Rank(bag.first_rank.value + static_cast<int32_t>(i)))) {
        const Chunk& chunk = plan.chunk(index);
        const bool travels = plan.degree_of(chunk) > 1, has_rows = chunk.num_tokens > 0;
        if (has_rows) (travels ? chunks : chunks_stay)[i] = true;
        (travels ? sequences : sequences_stay)[i] = true;
      }
    }
  }

  void set(ExchangeTable& pre_attn) const {
    set_peers_without_rows(pre_attn.send, pre_attn.this_peer, chunks, chunks_stay);
    set_peers_without_rows(pre_attn.recv, pre_attn.this_peer, sequences, sequences_stay);
  }

  std::vector<bool> chunks, chunks_stay, sequences, sequences_stay;
};

AttentionLevel make_level(const Plan& plan, const Bag& bag, Rank rank, int32_t degree, std::span<const int32_t> chunks,
                          int64_t first_row) {
  const int32_t index_in_bag = rank.value - bag.first_rank.value;
  const int32_t first_peer = index_in_bag / degree * degree;  // where this rank's group begins inside the bag
  AttentionLevel level;
  level.degree = degree;
  level.index_in_group = index_in_bag - first_peer;
  level.first_row = first_row;
  std::vector<PeerRun> received;
  int64_t num_attention_rows = 0;
  for (const int32_t index : chunks) {
    const SequenceId id = plan.chunk(index).sequence;
    level.num_rows += plan.chunk(index).num_tokens;
    level.seq_lens.push_back(plan.seq_lens()[id]);
    if (degree > 1) {
      for (const Chunk& chunk : plan.chunks(id)) {
        received.push_back(
            {.peer = chunk.rank.value - bag.first_rank.value,
             .run = {.first_row = num_attention_rows + chunk.first_token, .num_rows = chunk.num_tokens}});
      }
    }
    num_attention_rows += plan.seq_lens()[id];
  }
  if (degree == 1) return level;
  std::vector<PeerRun> sent;
  for (int32_t i = 0; i < degree; ++i) {
    sent.push_back({.peer = first_peer + i, .run = {.first_row = 0, .num_rows = level.num_rows}});
  }
  level.pre_attn = {.this_peer = index_in_bag,
                    .num_peers = bag.num_ranks,
                    .send = make_end(level.num_rows, bag.num_ranks, sent),
                    .recv = make_end(num_attention_rows, bag.num_ranks, received)};
  level.pre_attn.send.heads_shared = true;
  return level;
}

}  // namespace

ExchangeTable ExchangeTable::inverse() const {
  return {.this_peer = this_peer, .num_peers = num_peers, .send = recv, .recv = send};
}

RouteTables make_route_tables(const Plan& plan, Rank rank) {
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

  std::vector<bool> before, after;
  for (const int64_t num_tokens : plan.tokens_before()) before.push_back(num_tokens > 0);
  for (const int64_t num_tokens : plan.tokens_after()) after.push_back(num_tokens > 0);
  const std::vector<bool> none(before.size(), false);
  for (ExchangeTable* table : {&tables.tokens, &tables.sequences}) {
    set_peers_without_rows(table->send, rank.value, before, none);
    set_peers_without_rows(table->recv, rank.value, after, none);
  }
  return tables;
}

AttentionTables make_attention_tables(const Plan& plan, Rank rank) {
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
  const RowsInBag rows(plan, bag);
  for (AttentionLevel& level : tables.levels) {
    if (level.degree > 1) rows.set(level.pre_attn);
  }
  tables.any_shared = std::ranges::find(rows.sequences, true) != rows.sequences.end();
  return tables;
}

}  // namespace knapformer
