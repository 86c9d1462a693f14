// The op over tables that no plan made: any split of rows over ranks, any dtype, all engines, forward and backward.
// The oracle knows each row by the number that it carries.
#include "knapformer/torch/exchange/exchange.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <random>

#include "knapformer/core/util/error.h"
#include "tests/torch/exchange/tables.h"
#include "tests/torch/in_process_group.h"

namespace knapformer {
namespace {

using testing::InProcessWorld;
using testing::World;

/// rows[from][to] rows travel from one rank to another. Where they lie at either end is shuffled.
struct Pattern {
  std::string name;
  std::vector<std::vector<int64_t>> rows;
};

void PrintTo(const Pattern& pattern, std::ostream* out) { *out << pattern.name; }

World make_world(const Pattern& pattern, uint64_t seed) {
  std::mt19937_64 random(seed);
  testing::Rows sent;
  std::vector<int64_t> num_rows;
  for (const std::vector<int64_t>& counts : pattern.rows) {
    num_rows.push_back(std::accumulate(counts.begin(), counts.end(), int64_t{0}));
    const std::vector<int64_t> order = testing::shuffled(num_rows.back(), random);
    std::vector<std::vector<int64_t>>& of_peers = sent.emplace_back();
    auto next = order.begin();
    for (const int64_t count : counts) {
      of_peers.emplace_back(next, next + count);
      next += count;
    }
  }
  return testing::make_world(sent, num_rows, random);
}

std::vector<Pattern> patterns() {
  std::mt19937_64 random(7);
  std::vector<Pattern> all;
  for (const size_t n : {2, 3, 4, 8}) {
    const auto filled = [&](auto count) {
      std::vector<std::vector<int64_t>> rows(n, std::vector<int64_t>(n));
      for (size_t from = 0; from < n; ++from) {
        for (size_t to = 0; to < n; ++to) rows[from][to] = count(from, to);
      }
      return rows;
    };
    const std::string size = std::to_string(n);
    all.push_back({"uniform" + size, filled([](size_t, size_t) { return 5; })});
    all.push_back({"variable" + size, filled([&](size_t, size_t) { return static_cast<int64_t>(random() % 9); })});
    all.push_back({"only_self" + size, filled([](size_t f, size_t t) { return f == t ? 6 : 0; })});
    all.push_back({"never_self" + size, filled([](size_t f, size_t t) { return f == t ? 0 : 3; })});
    all.push_back({"all_zero" + size, filled([](size_t, size_t) { return 0; })});
    all.push_back({"to_last" + size, filled([&](size_t, size_t t) { return t + 1 == n ? 4 : 0; })});
    all.push_back({"from_first" + size, filled([](size_t f, size_t) { return f == 0 ? 4 : 0; })});
    all.push_back(
        {"upper" + size, filled([](size_t f, size_t t) { return f < t ? static_cast<int64_t>(f + 2 * t) : 0; })});
  }
  return all;
}

constexpr ExchangeEngine kEngines[] = {ExchangeEngine::kCpu, ExchangeEngine::kDevice, ExchangeEngine::kKernel};

std::string name_of(ExchangeEngine engine) {
  if (engine == ExchangeEngine::kCpu) return "cpu";
  return engine == ExchangeEngine::kDevice ? "device" : "kernel";
}

class ExchangePatterns : public ::testing::TestWithParam<std::tuple<Pattern, ExchangeEngine>> {
 protected:
  const Pattern& pattern() const { return std::get<0>(GetParam()); }
  ExchangeEngine engine() const { return std::get<1>(GetParam()); }
  int32_t num_ranks() const { return static_cast<int32_t>(pattern().rows.size()); }
};

INSTANTIATE_TEST_SUITE_P(All, ExchangePatterns,
                         ::testing::Combine(::testing::ValuesIn(patterns()), ::testing::ValuesIn(kEngines)),
                         [](const auto& test) {
                           return std::get<0>(test.param).name + "_" + name_of(std::get<1>(test.param));
                         });

std::shared_ptr<CommGroup> make_group(InProcessWorld& world, int32_t rank) {
  const auto peer_errors = std::make_shared<PeerErrors>(world.all(rank)->getStore(), rank);
  return CommGroup::make(world.all(rank), "exchange_test", peer_errors);
}

TEST(CommGroup, CountsWhatItMoves) {
  InProcessWorld world(2);
  world.run_all([&](int32_t rank) {
    const auto group = make_group(world, rank);
    const std::vector<int64_t> splits = rank == 0 ? std::vector<int64_t>{0, 3} : std::vector<int64_t>{3, 0};
    at::Tensor sent = at::full({3}, rank, at::kByte), received = at::empty({3}, at::kByte);
    group->wait(*group->start_all_to_all(received, sent, splits, splits, "swap"), at::kCPU, "swap");
    EXPECT_TRUE(at::equal(received, at::full({3}, 1 - rank, at::kByte)));
    at::Tensor own = at::full({2}, rank, at::kLong), all = at::empty({4}, at::kLong);
    group->wait(*group->start_all_gather(all, own, "gather"), at::kCPU, "gather");
    EXPECT_TRUE(at::equal(all, at::tensor({0, 0, 1, 1}, at::kLong)));
    EXPECT_EQ(group->counters().bytes_sent, 3 + 2 * 8);
    EXPECT_EQ(group->counters().num_collectives, 2);
    EXPECT_GE(group->counters().waited_ns, 0);
  });
}

PackedTable packed(const ExchangeTable& table, ExchangeEngine engine) {
  return pack_tables(std::vector{&table}, engine, at::kCPU)[0];
}

using GroupPtr = std::shared_ptr<CommGroup>;

/// Of tensors that travel by one table.
Tensors exchange_by(const PackedTable& table, const Tensors& tensors, const GroupPtr& group) {
  ExchangeArguments arguments{.group = group, .call = "test"};
  arguments.add(table, tensors.size());
  return run_exchange(tensors, std::move(arguments));
}

/// Rows of random bytes that `rank` owns: the same on whichever rank this is called.
at::Tensor random_bytes(int64_t rank, int64_t tensor, int64_t num_rows, int64_t row_bytes) {
  std::mt19937_64 random(static_cast<uint64_t>(rank * 1000 + tensor));
  at::Tensor bytes = at::empty({num_rows, row_bytes}, at::kByte);
  for (int64_t i = 0; i < bytes.numel(); ++i) bytes.mutable_data_ptr<uint8_t>()[i] = static_cast<uint8_t>(random());
  return bytes;
}

const std::vector<at::ScalarType> kDtypes = {
    at::kByte,          at::kChar,          at::kShort,       at::kInt,    at::kLong,        at::kHalf,
    at::kFloat,         at::kDouble,        at::kBFloat16,    at::kBool,   at::kComplexHalf, at::kComplexFloat,
    at::kComplexDouble, at::kFloat8_e4m3fn, at::kFloat8_e5m2, at::kUInt16, at::kUInt32,      at::kUInt64};

TEST_P(ExchangePatterns, MovesEveryDtypeBitForBitInOneCollective) {
  const World world = make_world(pattern(), 1);
  InProcessWorld ranks(num_ranks());
  ranks.run_all([&](int32_t rank) {
    const auto group = make_group(ranks, rank);
    const auto make_input = [&](int64_t of_rank, size_t i) {
      const int64_t rows = world.tables[static_cast<size_t>(of_rank)].send.num_rows,
                    columns = 1 + static_cast<int64_t>(i) % 4;
      const auto item = static_cast<int64_t>(c10::elementSize(kDtypes[i]));
      at::Tensor bytes = random_bytes(of_rank, static_cast<int64_t>(i), rows, columns * item);
      if (kDtypes[i] == at::kBool) bytes = bytes.bitwise_and(1);  // any other byte is no bool
      at::Tensor tensor = bytes.view(kDtypes[i]);
      return columns % 2 == 0 ? tensor.view({rows, 2, columns / 2}) : tensor;  // trailing shapes differ too
    };
    std::vector<at::Tensor> inputs;
    for (size_t i = 0; i < kDtypes.size(); ++i) inputs.push_back(make_input(rank, i));
    inputs.push_back(at::empty({inputs[0].size(0), 0}, at::kFloat));  // no columns at all
    const PackedTable table = packed(world.tables[static_cast<size_t>(rank)], engine());
    ExchangeArguments arguments{.group = group, .call = "test"};  // in two segments
    arguments.add(table, 7);
    arguments.add(table, inputs.size() - 7);
    const Tensors outputs = run_exchange(inputs, std::move(arguments));
    ASSERT_EQ(outputs.size(), inputs.size());
    const auto& expected = world.expected[static_cast<size_t>(rank)];
    for (size_t i = 0; i < kDtypes.size(); ++i) {
      ASSERT_EQ(outputs[i].scalar_type(), kDtypes[i]);
      ASSERT_EQ(outputs[i].size(0), static_cast<int64_t>(expected.size()));
      ASSERT_EQ(outputs[i].sizes().slice(1), inputs[i].sizes().slice(1));
      for (size_t row = 0; row < expected.size(); ++row) {
        const at::Tensor source = make_input(expected[row].first, i)[expected[row].second].contiguous();
        const at::Tensor got = outputs[i][static_cast<int64_t>(row)].contiguous();
        ASSERT_EQ(std::memcmp(got.const_data_ptr(), source.const_data_ptr(), source.nbytes()), 0)
            << "rank " << rank << " dtype " << c10::toString(kDtypes[i]) << " row " << row;
      }
    }
  });
  for (int32_t rank = 0; rank < num_ranks(); ++rank) {
    EXPECT_EQ(ranks.counts(rank).all_to_all, 1);
    EXPECT_EQ(ranks.counts(rank).bytes_sent_to_self, 0);
  }
}

TEST_P(ExchangePatterns, BackwardIsTheInverseTable) {
  const World world = make_world(pattern(), 2);
  InProcessWorld ranks(num_ranks());
  ranks.run_all([&](int32_t rank) {
    const auto group = make_group(ranks, rank);
    const auto r = static_cast<size_t>(rank);
    const int64_t rows = world.tables[r].send.num_rows;
    const at::Tensor x = at::full({rows, 3}, 1.0, at::kDouble).set_requires_grad(true);
    const at::Tensor fixed = at::full({rows}, 2.0, at::kFloat);
    const at::Tensor y = at::full({rows, 2}, 1.0, at::kFloat).set_requires_grad(true);
    const std::vector<at::Tensor> outputs = exchange_by(packed(world.tables[r], engine()), {x, fixed, y}, group);
    EXPECT_TRUE(outputs[0].requires_grad() && !outputs[1].requires_grad() && outputs[2].requires_grad());
    // Each output row's gradient names the row that it came from.
    at::Tensor weight = at::empty_like(outputs[0]);
    for (size_t row = 0; row < world.expected[r].size(); ++row) {
      const auto [from, from_row] = world.expected[r][row];
      for (int64_t c = 0; c < 3; ++c)
        weight[static_cast<int64_t>(row)][c] = static_cast<double>(from * 10000 + from_row * 10 + c);
    }
    // The sum's gradient is expanded, of stride 0.
    ((outputs[0] * weight).sum() + outputs[2].sum()).backward();
    ASSERT_TRUE(x.grad().defined());
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t c = 0; c < 3; ++c) ASSERT_EQ(x.grad()[row][c].item<double>(), rank * 10000 + row * 10 + c);
    }
    EXPECT_TRUE(at::equal(y.grad(), at::ones_like(y)));
  });
  for (int32_t rank = 0; rank < num_ranks(); ++rank) EXPECT_EQ(ranks.counts(rank).all_to_all, 2);
}

class ExchangeEngines : public ::testing::TestWithParam<ExchangeEngine> {};

INSTANTIATE_TEST_SUITE_P(All, ExchangeEngines, ::testing::ValuesIn(kEngines),
                         [](const auto& test) { return name_of(test.param); });

/// Two ranks that swap three rows and keep two.
Pattern swap_pattern() { return {"swap", {{2, 3}, {3, 2}}}; }

TEST_P(ExchangeEngines, TakesViewsAsTheyAre) {
  const World world = make_world(swap_pattern(), 5);
  InProcessWorld ranks(2);
  ranks.run_all([&](int32_t rank) {
    const auto group = make_group(ranks, rank);
    const auto r = static_cast<size_t>(rank);
    const at::Tensor fused = (at::arange(5 * 3 * 4, at::kFloat) + 1000 * rank).view({5, 3, 4});
    const at::Tensor conjugate = at::complex(fused.select(1, 0), fused.select(1, 1)).conj();
    const std::vector<at::Tensor> inputs = {fused.select(1, 1),                       // rows far apart
                                            fused.transpose(1, 2),                    // rows not dense
                                            fused.narrow(0, 0, 1).expand({5, 3, 4}),  // one row, five times
                                            fused.narrow(2, 1, 3),                    // begins inside a row
                                            conjugate,                                // not what its bytes say
                                            fused.select(2, 0).select(1, 2)};         // a vector with a stride
    const PackedTable table = packed(world.tables[r], GetParam());
    const std::vector<at::Tensor> outputs = exchange_by(table, inputs, group);
    std::vector<at::Tensor> copies;
    for (const at::Tensor& input : inputs) copies.push_back(input.resolve_conj().contiguous());
    const std::vector<at::Tensor> plain = exchange_by(table, copies, group);
    for (size_t i = 0; i < inputs.size(); ++i) EXPECT_TRUE(at::equal(outputs[i], plain[i])) << i;
    for (size_t row = 0; row < 5; ++row) {
      const auto [from, from_row] = world.expected[r][row];
      EXPECT_EQ(outputs[0][static_cast<int64_t>(row)][0].item<float>(),
                static_cast<float>(1000 * from + from_row * 12 + 4));
    }
  });
}

TEST_P(ExchangeEngines, MovesRunsThatThreadsDivide) {
  const World world = make_world({"many", {{3000, 4001}, {2003, 1007}}}, 10);
  InProcessWorld ranks(2);
  ranks.run_all([&](int32_t rank) {
    at::set_num_threads(3);
    const auto group = make_group(ranks, rank);
    const auto r = static_cast<size_t>(rank);
    const auto rows_of = [&](int64_t of_rank) {  // 300 bytes each
      const int64_t num_rows = world.tables[static_cast<size_t>(of_rank)].send.num_rows;
      return (at::arange(num_rows * 75, at::kInt) + 1000000 * of_rank).view({num_rows, 75});
    };
    const at::Tensor moved = exchange_by(packed(world.tables[r], GetParam()), {rows_of(rank)}, group)[0];
    const at::Tensor sent[] = {rows_of(0), rows_of(1)};
    for (size_t row = 0; row < world.expected[r].size(); ++row) {
      const auto [from, from_row] = world.expected[r][row];
      ASSERT_TRUE(at::equal(moved[static_cast<int64_t>(row)], sent[from][from_row])) << row;
    }
  });
}

TEST(Exchange, RefusesWhatDoesNotFitItsTables) {
  const World world = make_world(swap_pattern(), 9);
  InProcessWorld ranks(2);
  const auto errors = ranks.run([&](int32_t rank) {
    const auto group = make_group(ranks, rank);
    static_cast<void>(
        exchange_by(packed(world.tables[static_cast<size_t>(rank)], ExchangeEngine::kCpu), {at::zeros({4})}, group));
  });
  for (const auto& error : errors)
    EXPECT_NE(testing::describe(error).find("got 4 rows, expected 5"), std::string::npos);
}

}  // namespace
}  // namespace knapformer
