#include "knapformer/torch/exchange/arguments.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace knapformer {
namespace {

/// A table of `sent` rows that become `received` ones.
PackedTable packed(int64_t sent, int64_t received) {
  const auto end = [](int64_t rows) {
    return ExchangeEnd{.num_rows = rows, .runs = {.values = {{0, rows}}, .offsets = {0, 1}}, .peer_rows = {rows}};
  };
  const ExchangeTable table{.this_peer = 0, .num_peers = 1, .send = end(sent), .recv = end(received)};
  return pack_tables(std::vector{&table}, ExchangeEngine::kCpu, at::kCPU)[0];
}

/// x and ids travel by one table, s by another; q by a third, with heads shared at the sending end.
ExchangeArguments example() {
  ExchangeArguments arguments{
      .heads = {.num_heads = 5, .num_kv_heads = 5}, .group = "group", .call = "route", .names = {"x", "ids", "s", "q"}};
  arguments.add(packed(4, 6), {at::zeros({4, 3}).set_requires_grad(true), at::zeros({4}, at::kLong)},
                {HeadRole::kNone, HeadRole::kNone});
  arguments.add(packed(2, 9), {at::zeros({2, 7})}, {HeadRole::kNone});
  arguments.add(packed(1, 1), {}, {});
  arguments.add(packed(4, 8), {at::zeros({4, 5, 2}).set_requires_grad(true)}, {HeadRole::kQuery},
                {.shared_end = HeadSharing::kSend, .degree = 2, .index_in_group = 1});
  arguments.decide_gradients();
  return arguments;
}

TEST(ExchangeArguments, DecideWhichGradientsTravel) {
  EXPECT_EQ(example().segments.size(), 3u);  // one without tensors is left out
  EXPECT_EQ(example().differentiable, (std::vector<int64_t>{1, 0, 0, 1}));
  EXPECT_TRUE(example().any_gradient());
  const at::NoGradGuard no_grad;
  EXPECT_TRUE(example().differentiable.empty());
  EXPECT_FALSE(example().any_gradient());
}

TEST(ExchangeArguments, InverseMovesGradientsBack) {
  const ExchangeArguments arguments = example();
  const at::NoGradGuard backward;
  const ExchangeArguments inverse = arguments.inverse({at::zeros({6, 3}), {}, {}, at::zeros({8, 2, 2})});
  EXPECT_EQ(inverse.label(), "route backward(x.grad,q.grad)");
  EXPECT_EQ(inverse.group, "group");
  EXPECT_EQ(inverse.tensors.size(), 2u);
  EXPECT_EQ(inverse.segments.size(), 2u);
  EXPECT_EQ(inverse.segments[1].sharing.shared_end, HeadSharing::kRecv);
  const std::vector<at::Tensor> gradients = arguments.gradients_from(inverse.tensors);
  EXPECT_TRUE(gradients[0].is_same(inverse.tensors[0]) && gradients[3].is_same(inverse.tensors[1]));
  EXPECT_FALSE(gradients[1].defined() || gradients[2].defined());
}

TEST(ExchangeArguments, FingerprintSaysWhatRanksMustShare) {
  const Fingerprint fingerprint = example().fingerprint();
  EXPECT_EQ(fingerprint.fields,
            "call\troute\nheads\t5 query, 5 key/value\nx\tFloat (rows, 3) on cpu\nids\tLong (rows) on cpu\n"
            "s\tFloat (rows, 7) on cpu\nq\tFloat (rows, 5, 2) on cpu\n");
  EXPECT_EQ(fingerprint.gradients, "1001");
  const at::NoGradGuard no_grad;
  EXPECT_TRUE(example().fingerprint().fields.starts_with("call\troute without gradients\n"));
}

}  // namespace
}  // namespace knapformer
