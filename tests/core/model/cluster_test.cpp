#include "knapformer/core/model/cluster.h"

#include <gtest/gtest.h>

#include <limits>

#include "knapformer/core/model/trained_model.h"
#include "tests/core/refusals.h"

namespace knapformer {
namespace {

TEST(Cluster, RefusesWhatIsNoCluster) {
  for (const double bad : {0.0, -1.0, 1e-300, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_THROW((Cluster{.flops_per_s = bad}).validate(), ArgumentError);
    EXPECT_THROW((Cluster{.node_bytes_per_s = bad}).validate(), ArgumentError);
    EXPECT_THROW((Cluster{.network_bytes_per_s = bad}).validate(), ArgumentError);
  }
  EXPECT_THROW((Cluster{.flops_per_s = kInfinity}).validate(), ArgumentError);
  EXPECT_THROW((Cluster{.node_latency_s = -1}).validate(), ArgumentError);
  EXPECT_THROW((Cluster{.fixed_s = 1e300}).validate(), ArgumentError);
  EXPECT_THROW((Cluster{.ranks_per_node = 0}).validate(), ArgumentError);
  EXPECT_NO_THROW((Cluster{.node_bytes_per_s = kInfinity, .network_bytes_per_s = kInfinity}).validate());
}

TEST(Cluster, HasNames) {
  for (const std::string_view name : Cluster::names()) EXPECT_NO_THROW(Cluster::named(name).validate()) << name;
  EXPECT_EQ(Cluster::named("h100"), Cluster{});
  // Sustained shares of the data sheets are the same everywhere: a B200's 2,250 TFLOP/s over an H100's 989.
  EXPECT_NEAR(Cluster::named("b200").flops_per_s / Cluster{}.flops_per_s, 2250.0 / 989, 1e-12);
  EXPECT_LT(Cluster::named("a100").node_bytes_per_s, Cluster{}.node_bytes_per_s);
  EXPECT_EQ(refusal_of([] { Cluster::named("h1000"); }),
            "cluster: got 'h1000', expected one of 'h100', 'h100-pcie', 'h200', 'b200', 'a100', 'cpu'");
}

TEST(TrainedModel, CountsItsPasses) {
  const Passes training = TrainedModel{}.passes();
  EXPECT_EQ(training.token(), 4);
  EXPECT_EQ(training.attention(), 4);
  EXPECT_EQ(training.exchanges(), 3);
  const Passes kept = TrainedModel{.recomputes = false}.passes();
  EXPECT_EQ(kept.token(), 3);
  EXPECT_EQ(kept.exchanges(), 2);
  const Passes lora = TrainedModel{.mode = StepMode::kLora}.passes();
  EXPECT_EQ(lora.token(), 3);  // no gradients of the frozen matrices
  EXPECT_EQ(lora.attention(), 4);
  EXPECT_EQ(lora.exchanges(), 3);
  const Passes inference = TrainedModel{.mode = StepMode::kInference}.passes();
  EXPECT_EQ(inference.token(), 1);
  EXPECT_EQ(inference.attention(), 1);
  EXPECT_EQ(inference.exchanges(), 1);
  EXPECT_EQ(inference.routes, 2);
  EXPECT_EQ(training.routes, 4);
  EXPECT_EQ((TrainedModel{.routed = false}.passes().routes), 0);
  EXPECT_EQ((TrainedModel{.mode = StepMode::kInference, .routed = false}.passes().routes), 0);
}

TEST(TrainedModel, RefusesWhatIsNoModel) {
  EXPECT_THROW((TrainedModel{.num_blocks = 0}).validate(), ArgumentError);
  EXPECT_THROW((TrainedModel{.element_size = 0}).validate(), ArgumentError);
  EXPECT_THROW((TrainedModel{.shard_ranks = 0}).validate(), ArgumentError);
  EXPECT_THROW((TrainedModel{.num_heads = -1}).validate(), ArgumentError);
  EXPECT_THROW((TrainedModel{.num_kv_heads = 4}).validate(), ArgumentError);
  EXPECT_THROW((TrainedModel{.num_heads = 6, .num_kv_heads = 4}).validate(), ArgumentError);
  EXPECT_NO_THROW((TrainedModel{.num_heads = 24, .num_kv_heads = 8}).validate());
  EXPECT_THROW(parse_step_mode("train"), ArgumentError);
  for (const char* name : {"training", "lora", "inference"}) EXPECT_EQ(step_mode_name(parse_step_mode(name)), name);
}

}  // namespace
}  // namespace knapformer
