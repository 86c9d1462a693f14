// Exchange tables of all ranks, run over integer rows in memory; and the plans for which they are checked.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "knapformer/core/plan/exchange_table.h"
#include "tests/core/cases.h"

namespace knapformer {

using Rows = std::vector<int64_t>;

inline int64_t token_row(SequenceId id, int64_t token) { return id.value * 1'000'000 + token; }

/// Rows of an end, in the order in which they go over the wire to `peer`.
inline std::vector<int64_t> wire_rows(const ExchangeEnd& end, int32_t peer) {
  std::vector<int64_t> rows;
  for (const RowRun& run : end.runs.of(peer)) {
    for (int64_t i = 0; i < run.num_rows; ++i) rows.push_back(run.first_row + i);
  }
  return rows;
}

inline void check_end(const ExchangeEnd& end, int32_t num_peers) {
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
inline std::vector<Rows> exchanged(const std::vector<ExchangeTable>& tables, const std::vector<Rows>& inputs) {
  constexpr int64_t kUnset = -1;
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

inline std::vector<ExchangeTable> inverses(std::vector<ExchangeTable> tables) {
  for (ExchangeTable& table : tables) std::swap(table.send, table.recv);
  return tables;
}

inline Rows tokens_held(const MicroBatchPlan& plan, Rank rank) {
  Rows rows;
  for (const int32_t index : plan.chunks_on(rank)) {
    const Chunk& c = plan.chunk(index);
    for (int64_t t = 0; t < c.num_tokens; ++t) rows.push_back(token_row(c.sequence, c.first_token + t));
  }
  return rows;
}

/// Checks random plans that follow from `seed`, and those of a planner.
inline void check_plans(int seed, void (*check)(const MicroBatchPlan&)) {
  constexpr int kCases = 400;
  for (int i = 0; i < kCases; ++i) {
    Cases cases(static_cast<uint64_t>(seed * kCases + i));
    const bool nested = i % 2 == 0;
    PlanInput input = cases.input(nested);
    if (i % 4 < 2) cases.cut_attention(input);
    const MicroBatchPlan any = cases.any_plan(std::move(input));
    SCOPED_TRACE(testing::Message() << "case " << seed * kCases + i << ", topology " << any.topology().str());
    any.validate();
    check(any);
    if (!nested) {
      const MicroBatchPlan planned = greedy(any.input());
      planned.validate();
      check(planned);
    }
    if (testing::Test::HasFailure()) break;
  }
}

}  // namespace knapformer
