// Exchange tables that no plan made: any rows to any peers.
#pragma once

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "knapformer/core/plan/exchange_table.h"

namespace knapformer::testing {

/// Rows by [rank][peer].
using Rows = std::vector<std::vector<std::vector<int64_t>>>;

/// 0 to count - 1, in runs of up to max_run.
inline std::vector<int64_t> shuffled(int64_t count, std::mt19937_64& random, uint64_t max_run = 4) {
  std::vector<std::vector<int64_t>> runs;
  for (int64_t i = 0; i < count;) {
    std::vector<int64_t>& run = runs.emplace_back();
    for (uint64_t left = 1 + random() % max_run; left > 0 && i < count; --left) run.push_back(i++);
  }
  std::ranges::shuffle(runs, random);
  std::vector<int64_t> order;
  for (const auto& run : runs) order.insert(order.end(), run.begin(), run.end());
  return order;
}

inline ExchangeEnd end_of(const std::vector<std::vector<int64_t>>& rows_of_peer, int64_t num_rows) {
  ExchangeEnd end{.num_rows = num_rows, .runs = {}, .peer_rows = {}};
  std::vector<bool> seen(static_cast<size_t>(num_rows), false);
  for (const std::vector<int64_t>& rows : rows_of_peer) {
    for (size_t i = 0; i < rows.size(); ++i) {
      end.has_duplicate_rows = end.has_duplicate_rows || seen[static_cast<size_t>(rows[i])];
      seen[static_cast<size_t>(rows[i])] = true;
      if (i > 0 && rows[i] == rows[i - 1] + 1) {
        ++end.runs.values.back().num_rows;
      } else {
        end.runs.values.push_back({.first_row = rows[i], .num_rows = 1});
      }
    }
    end.runs.end_list();
    end.peer_rows.push_back(static_cast<int64_t>(rows.size()));
  }
  return end;
}

/// Tables of all ranks, and for each rank and received row the (rank, row) that it must hold.
struct World {
  std::vector<ExchangeTable> tables;
  std::vector<std::vector<std::pair<int64_t, int64_t>>> expected;
};

/// Of ranks that have num_rows rows each and send some of them. Where they arrive is shuffled.
inline World make_world(const Rows& sent, const std::vector<int64_t>& num_rows, std::mt19937_64& random) {
  World world;
  for (size_t rank = 0; rank < sent.size(); ++rank) {
    int64_t num_received = 0;
    for (const auto& from : sent) num_received += static_cast<int64_t>(from[rank].size());
    const std::vector<int64_t> places = shuffled(num_received, random);
    std::vector<std::vector<int64_t>> received;
    std::vector<std::pair<int64_t, int64_t>>& expected = world.expected.emplace_back(places.size());
    for (auto next = places.begin(); received.size() < sent.size();) {
      const auto peer = static_cast<int64_t>(received.size());
      std::vector<int64_t>& from_peer = received.emplace_back();
      for (const int64_t row : sent[received.size() - 1][rank]) {
        expected[static_cast<size_t>(*next)] = {peer, row};
        from_peer.push_back(*next++);
      }
    }
    world.tables.push_back({.this_peer = static_cast<int32_t>(rank),
                            .num_peers = static_cast<int32_t>(sent.size()),
                            .send = end_of(sent[rank], num_rows[rank]),
                            .recv = end_of(received, num_received)});
  }
  return world;
}

}  // namespace knapformer::testing
