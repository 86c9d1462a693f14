// The oracle is the index formula: what each row must hold is written down from the plan's chunks alone.
#include "knapformer/core/plan/attention_tables.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "tests/core/exchange_rows.h"

namespace knapformer {
namespace {

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
      EXPECT_EQ(exchanged(queries, partial), whole_queries);
      std::vector<Rows> come(partial.size());
      for (size_t s = 0; s < keys.size(); ++s) {
        const std::vector<Rows> of_stage = exchanged(keys[s], partial);
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

class TablesOfAttention : public testing::TestWithParam<int> {};

TEST_P(TablesOfAttention, MoveEveryRowToWhereThePlanSays) { check_plans(GetParam(), check_attention); }

INSTANTIATE_TEST_SUITE_P(Seeds, TablesOfAttention, testing::Range(0, 10));

}  // namespace
}  // namespace knapformer
