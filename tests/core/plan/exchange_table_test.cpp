// The oracle is the index formula: what each row must hold is written down from the plan's chunks alone.
#include "knapformer/core/plan/exchange_table.h"

#include <gtest/gtest.h>

#include <utility>

#include "tests/core/exchange_rows.h"

namespace knapformer {
namespace {

Rows tokens_at_home(const MicroBatchPlan& plan, Rank rank) {
  Rows rows;
  for (int32_t s = plan.seq_lens().first_of(rank).value; s < plan.seq_lens().last_of(rank).value; ++s) {
    for (int64_t t = 0; t < plan.seq_lens()[SequenceId(s)]; ++t) rows.push_back(token_row(SequenceId(s), t));
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
  EXPECT_EQ(exchanged(tokens, home), held);
  EXPECT_EQ(exchanged(inverses(tokens), held), home);
  EXPECT_EQ(exchanged(sequences, home_sequences), held_sequences);
  for (int32_t r = 0; r < plan.num_ranks(); ++r) {
    EXPECT_FALSE(tokens[r].send.has_duplicate_rows || tokens[r].recv.has_duplicate_rows);
  }
}

class ExchangeTables : public testing::TestWithParam<int> {};

TEST_P(ExchangeTables, MoveEveryRowToWhereThePlanSays) { check_plans(GetParam(), check_route); }

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
