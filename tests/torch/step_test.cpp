#include "knapformer/torch/step.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "knapformer/torch/balancer.h"
#include "tests/torch/in_process_group.h"

namespace knapformer {
namespace {

TEST(Step, SumsHalfTypesInFloat) {
  // 8 ranks share a sequence: the sum of 256 and seven times 1 is 256 in bfloat16, 263 -> 264 by way of float.
  testing::InProcessWorld world(8);
  world.run_all([&](int32_t rank) {
    for (const ExchangeEngine engine : {ExchangeEngine::kCpu, ExchangeEngine::kDevice}) {
      SequenceBalancer balancer("g8n1", {.solver = "greedy", .engine = engine}, world.all(rank),
                                [&](const std::vector<int64_t>& ranks) { return world.group(ranks, rank); });
      balancer.plan_routing(rank == 3 ? std::vector<int64_t>{16} : std::vector<int64_t>{}, 8);
      const int64_t count = rank == 3 ? 1 : 0;
      const at::Tensor side = at::ones({count, 2}, at::kBFloat16).set_requires_grad(true);
      const Step::Routed routed = balancer.current().route(at::zeros({count * 16, 1}), {}, {side});
      (routed.sequence_features.at(0) * (rank == 0 ? 256 : 1)).sum().backward();
      EXPECT_TRUE(rank != 3 || side.grad()[0][1].item<double>() == 264.0);
    }
  });
}

}  // namespace
}  // namespace knapformer
