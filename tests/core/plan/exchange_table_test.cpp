// The tables of all ranks, run over integer rows in memory. The oracle is the index formula: what each row must hold is
// written down from the plan's chunks alone.
#include "knapformer/core/plan/exchange_table.h"

#include <gtest/gtest.h>

#include <numeric>
#include <utility>

#include "knapformer/core/planners/planner.h"
#include "tests/core/cases.h"

namespace knapformer {
namespace {

using Rows = std::vector<int64_t>;

constexpr int64_t kUnset = -1;

int64_t token_row(SequenceId id, int64_t token) { return id.value * 1'000'000 + token; }

/// Rows of an end, in the order in which they go over the wire to `peer`.
std::vector<int64_t> wire_rows(const ExchangeEnd& end, int32_t peer) {
  std::vector<int64_t> rows;
  for (const RowRun& run : end.runs.of(peer)) {
    for (int64_t i = 0; i < run.num_rows; ++i) rows.push_back(run.first_row + i);
  }
  return rows;
}

void check_end(const ExchangeEnd& end, int32_t num_peers) {
  ASSERT_EQ(end.runs.size(), num_peers);
  ASSERT_EQ(end.peer_rows.size(), static_cast<size_t>(num_peers));
  for (int32_t peer = 0; peer < num_peers; ++peer) {
    const auto runs = end.runs.of(peer);
    int64_t rows = 0;
    for (size_t i = 0; i < runs.size(); ++i) {
      EXPECT_GT(runs[i].num_rows, 0);
      EXPECT_GE(runs[i].first_row, 0);
      EXPECT_LE(runs[i].first_row + runs[i].num_rows, end.num_rows);
      if (i > 0) {
        EXPECT_NE(runs[i].first_row, runs[i - 1].first_row + runs[i - 1].num_rows) << "runs are not joined";
      }
      rows += runs[i].num_rows;
    }
    EXPECT_EQ(rows, end.peer_rows[peer]);
  }
}

/// One exchange over a group: tables[i] and inputs[i] belong to its i-th rank. Each received row must come just once.
std::vector<Rows> run(const std::vector<ExchangeTable>& tables, const std::vector<Rows>& inputs) {
  const auto num_peers = static_cast<int32_t>(tables.size());
  std::vector<Rows> outputs;
  for (int32_t me = 0; me < num_peers; ++me) {
    const ExchangeTable& mine = tables[me];
    EXPECT_EQ(mine.this_peer, me);
    EXPECT_EQ(mine.num_peers, num_peers);
    check_end(mine.send, num_peers);
    check_end(mine.recv, num_peers);
    EXPECT_EQ(static_cast<int64_t>(inputs[me].size()), mine.send.num_rows);
    Rows& out = outputs.emplace_back(static_cast<size_t>(mine.recv.num_rows), kUnset);
    for (int32_t peer = 0; peer < num_peers; ++peer) {
      const auto sent = wire_rows(tables[peer].send, me);
      const auto received = wire_rows(mine.recv, peer);
      EXPECT_EQ(sent.size(), received.size()) << "splits disagree between " << peer << " and " << me;
      for (size_t i = 0; i < std::min(sent.size(), received.size()); ++i) {
        int64_t& row = out[received[i]];
        EXPECT_EQ(row, kUnset) << "a row came twice";
        row = inputs[peer][sent[i]];
      }
    }
    for (const int64_t row : out) EXPECT_NE(row, kUnset) << "a row never came";
  }
  return outputs;
}

std::vector<ExchangeTable> inverses(std::vector<ExchangeTable> tables) {
  for (ExchangeTable& table : tables) std::swap(table.send, table.recv);
  return tables;
}

Rows tokens_at_home(const MicroBatchPlan& plan, Rank rank) {
  Rows rows;
  for (int32_t s = plan.seq_lens().first_of(rank).value; s < plan.seq_lens().last_of(rank).value; ++s) {
    for (int64_t t = 0; t < plan.seq_lens()[SequenceId(s)]; ++t) rows.push_back(token_row(SequenceId(s), t));
  }
  return rows;
}

Rows tokens_held(const MicroBatchPlan& plan, Rank rank) {
  Rows rows;
  for (const int32_t index : plan.chunks_on(rank)) {
    const Chunk& c = plan.chunk(index);
    for (int64_t t = 0; t < c.num_tokens; ++t) rows.push_back(token_row(c.sequence, c.first_token + t));
  }
  return rows;
}

void check_route(const MicroBatchPlan& plan) {
  std::vector<ExchangeTable> tokens, sequences;
  std::vector<Rows> home, held, home_sequences, held_sequences;
  for (int32_t r = 0; r < plan.num_ranks(); ++r) {
    RouteTables tables = make_route_tables(plan, Rank(r));
    std::vector<int64_t> chunk_lens;
    Rows& sequences_held = held_sequences.emplace_back();
    for (const int32_t index : plan.chunks_on(Rank(r))) {
      chunk_lens.push_back(plan.chunk(index).num_tokens);
      sequences_held.push_back(plan.chunk(index).sequence.value);
    }
    EXPECT_EQ(tables.chunk_lens, chunk_lens);
    tokens.push_back(std::move(tables.tokens));
    sequences.push_back(std::move(tables.sequences));
    home.push_back(tokens_at_home(plan, Rank(r)));
    held.push_back(tokens_held(plan, Rank(r)));
    Rows& ids = home_sequences.emplace_back();
    for (int32_t s = plan.seq_lens().first_of(Rank(r)).value; s < plan.seq_lens().last_of(Rank(r)).value; ++s)
      ids.push_back(s);
  }
  EXPECT_EQ(run(tokens, home), held);
  EXPECT_EQ(run(inverses(tokens), held), home);
  EXPECT_EQ(run(sequences, home_sequences), held_sequences);
  for (int32_t r = 0; r < plan.num_ranks(); ++r) {
    EXPECT_FALSE(tokens[r].send.has_duplicate_rows || tokens[r].recv.has_duplicate_rows);
  }
}

void check_attention(const MicroBatchPlan& plan) {
  for (const Bag& bag : plan.topology().bags()) {
    std::vector<AttentionTables> tables;
    for (int32_t i = 0; i < bag.num_ranks; ++i)
      tables.push_back(make_attention_tables(plan, Rank(bag.first_rank.value + i)));
    const auto& degrees = plan.topology().shapes()[bag.shape].degrees;
    for (size_t level = 0; level < degrees.size(); ++level) {
      std::vector<ExchangeTable> queries;
      std::vector<std::vector<ExchangeTable>> keys;  // by stage
      std::vector<Rows> partial, whole_queries, whole_keys;
      for (int32_t i = 0; i < bag.num_ranks; ++i) {
        const Rank rank(bag.first_rank.value + i);
        const AttentionLevel& mine = tables[i].levels[level];
        ASSERT_EQ(mine.degree, degrees[level]);
        EXPECT_EQ(mine.index_in_group, i % mine.degree);
        const Rows held = tokens_held(plan, rank);
        partial.emplace_back(held.begin() + mine.first_row, held.begin() + mine.first_row + mine.num_rows);
        Rows &of_queries = whole_queries.emplace_back(), &of_keys = whole_keys.emplace_back();
        std::vector<QueryPart> sequences;
        for (int32_t s = 0; s < plan.num_sequences(); ++s) {  // this rank's part of each sequence, in order
          const Placement& place = plan.placement(SequenceId(s));
          if (place.degree != mine.degree || rank < place.first_rank ||
              rank.value >= place.first_rank.value + place.degree)
            continue;
          const std::vector<QueryPart> parts = plan.query_parts(SequenceId(s));
          const auto head_parts = mine.degree / static_cast<int32_t>(parts.size());
          const QueryPart& part = parts[static_cast<size_t>((rank.value - place.first_rank.value) / head_parts)];
          sequences.push_back(part);
          for (int64_t t = 0; t < part.num_queries; ++t)
            of_queries.push_back(token_row(SequenceId(s), part.first_query + t));
          for (int64_t t = 0; t < part.num_keys; ++t) of_keys.push_back(token_row(SequenceId(s), part.first_key + t));
        }
        EXPECT_EQ(mine.sequences, sequences);
        queries.push_back(mine.queries);
        keys.resize(std::max(mine.stages.size(), size_t{1}));
        for (size_t s = 0; s < keys.size(); ++s) {
          keys[s].push_back(mine.cuts_queries() ? mine.stages[s].keys : mine.queries);
        }
        if (mine.degree == 1) {
          EXPECT_EQ(partial.back(), of_queries) << "what is whole on a rank needs no exchange";
        }
        EXPECT_EQ(mine.queries.send.heads_shared, mine.degree > 1);
        EXPECT_FALSE(mine.queries.recv.heads_shared);
      }
      if (degrees[level] == 1) continue;
      EXPECT_EQ(run(queries, partial), whole_queries);
      std::vector<Rows> come(partial.size());
      for (size_t s = 0; s < keys.size(); ++s) {
        const std::vector<Rows> of_stage = run(keys[s], partial);
        for (size_t i = 0; i < come.size(); ++i) {
          come[i].insert(come[i].end(), of_stage[i].begin(), of_stage[i].end());
          if (keys.size() == 1) continue;
          const auto& lens = tables[i].levels[level].stages[s].key_lens;
          EXPECT_EQ(std::accumulate(lens.begin(), lens.end(), int64_t{0}), std::ssize(of_stage[i]));
          const auto& sequences = tables[i].levels[level].sequences;
          for (size_t next = 0, n = 0; n < lens.size(); next += static_cast<size_t>(lens[n++])) {  // whose they are
            for (size_t t = next; t < next + static_cast<size_t>(lens[n]); ++t)
              EXPECT_EQ(std::ranges::count(whole_keys[i], of_stage[i][t]), 1) << sequences.size();
          }
        }
      }
      if (keys.size() > 1) {
        for (auto* rows : {&come, &whole_keys}) std::ranges::for_each(*rows, [](Rows& of) { std::ranges::sort(of); });
      }
      EXPECT_EQ(come, whole_keys);
      // The way back sends each rank its own tokens, once from every rank that had queries of theirs.
      const auto back = inverses(queries);
      const int32_t num_parts = plan.input().attention_cut(degrees[level]).num_parts;
      for (int32_t i = 0; i < bag.num_ranks; ++i) {
        Rows sent;
        for (int32_t peer = 0; peer < bag.num_ranks; ++peer) {
          const Rows rows = wire_rows(back[peer].send, i);
          EXPECT_TRUE(rows.empty() || peer / degrees[level] == i / degrees[level]);
          for (const int64_t row : rows) sent.push_back(whole_queries[peer][row]);
        }
        Rows expected;
        for (int32_t copy = 0; copy < degrees[level] / num_parts; ++copy)
          expected.insert(expected.end(), partial[i].begin(), partial[i].end());
        std::ranges::sort(sent);
        std::ranges::sort(expected);
        EXPECT_EQ(sent, expected);
      }
    }
  }
}

class ExchangeTables : public testing::TestWithParam<int> {};

TEST_P(ExchangeTables, MoveEveryRowToWhereThePlanSays) {
  constexpr int kCases = 400;
  for (int i = 0; i < kCases; ++i) {
    Cases cases(static_cast<uint64_t>(GetParam() * kCases + i));
    const bool nested = i % 2 == 0;
    PlanInput input = cases.input(nested);
    if (i % 4 < 2) cases.cut_attention(input);
    const MicroBatchPlan any = cases.any_plan(std::move(input));
    SCOPED_TRACE(testing::Message() << "case " << GetParam() * kCases + i << ", topology " << any.topology().str());
    any.validate();
    check_route(any);
    check_attention(any);
    if (!nested) {
      const MicroBatchPlan planned = greedy(any.input());
      planned.validate();
      check_route(planned);
      check_attention(planned);
    }
    if (testing::Test::HasFailure()) break;
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, ExchangeTables, testing::Range(0, 10));

TEST(ExchangeTables, NeighbouringRowsOfAPeerAreOneRun) {
  // Three sequences that all move from rank 0 to rank 1: one memory copy, not three.
  PlanInput input = lengths_in({{5, 6, 7}, {}}, "g1n2", 8);
  const Placement to_1 = at(1, 1, 1);
  const MicroBatchPlan plan(std::move(input), "any", {to_1, to_1, to_1});
  EXPECT_EQ(make_route_tables(plan, Rank(0)).tokens.send.runs.values, (std::vector<RowRun>{{0, 18}}));
  EXPECT_EQ(make_route_tables(plan, Rank(1)).tokens.recv.runs.values, (std::vector<RowRun>{{0, 18}}));
}

}  // namespace
}  // namespace knapformer
