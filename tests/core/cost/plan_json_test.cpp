#include "knapformer/core/cost/plan_json.h"

#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "knapformer/core/planners/planner.h"
#include "knapformer/core/util/error.h"
#include "tests/core/cases.h"

namespace knapformer {
namespace {

MicroBatchPlan read(const std::string& json) { return plan_from_json(json).plans()[0]; }

TEST(PlanJson, GoesOutAndIn) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    Cases cases(seed);
    PlanInput in = cases.input(seed % 2 == 0);
    in.cluster = Cluster::named(Cluster::names()[seed % Cluster::names().size()]);
    in.model.mode = static_cast<StepMode>(seed % 3);
    if (seed % 5 == 0) in.cluster.node_bytes_per_s = std::numeric_limits<double>::infinity();
    if (seed % 3 == 0) {
      std::vector<double> work;
      for (const int64_t length : in.seq_lens.lens())
        work.push_back(static_cast<double>(length * cases.integer(1, 9)) / 7);
      in.give_work(work);
    }
    if (seed % 4 == 1) cases.cut_attention(in);
    const MicroBatchPlan plan = cases.any_plan(in);
    EXPECT_EQ(read(plan_to_json(plan)), plan);
    EXPECT_EQ(plan_to_json(read(plan_to_json(plan))), plan_to_json(plan));
  }
}

TEST(PlanJson, InfiniteImbalanceIsNull) {
  const MicroBatchPlan plan = greedy(lengths_in({{4}, {}}, "g1n2", 8));
  EXPECT_TRUE(nlohmann::json::parse(plan_to_json(plan))["balance_before"]["wir"].is_null());
}

TEST(PlanJson, RefusesAnyTruncation) {
  Cases cases(5);
  const std::string json = plan_to_json(cases.any_plan(cases.input(false)));
  for (size_t n = 0; n < json.size(); n += 7) EXPECT_THROW(plan_from_json(json.substr(0, n)), ArgumentError) << n;
}

TEST(PlanJson, RefusesChunksWhoseSumWouldWrap) {
  const MicroBatchPlan plan = greedy(lengths_in({{10}, {}, {}, {}}, "g4n1", 8));
  auto json = nlohmann::json::parse(plan_to_json(plan));
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  json["chunk_lens_of_sequence"] = {{kMost, kMost, 12, 0}};
  EXPECT_THROW(plan_from_json(json.dump()), ArgumentError);
}

TEST(PlanJson, RefusesDeepNesting) {
  const std::string deep = std::string(1'000'000, '[') + std::string(1'000'000, ']');
  const std::string json = R"({"format":"knapformer.plan/2","cluster":)" + deep + "}";
  EXPECT_THROW(plan_from_json(json), ArgumentError);
  EXPECT_THROW(plan_from_json(R"({"format":"knapformer.step_plan/1","plans":)" + deep + "}"), ArgumentError);
}

TEST(PlanJson, RefusesWhatIsNoPlan) {
  Cases cases(5);
  const auto good = nlohmann::json::parse(plan_to_json(cases.any_plan(cases.input(false))));
  EXPECT_THROW(plan_from_json("[]"), ArgumentError);
  EXPECT_THROW(plan_from_json("{}"), ArgumentError);
  const std::vector<std::pair<const char*, nlohmann::json>> broken = {{"format", "other/1"},
                                                                      {"topology", 3},
                                                                      {"topology", "g7n1"},
                                                                      {"num_ranks", -1},
                                                                      {"d_model", 0},
                                                                      {"gamma", -2},
                                                                      {"gamma", "one"},
                                                                      {"seq_lens", {{0}}},
                                                                      {"bag_of_sequence", {-1}},
                                                                      {"degree_of_sequence", nlohmann::json::array()},
                                                                      {"first_rank_of_sequence", {100000}},
                                                                      {"chunk_lens_of_sequence", {{-1}}}};
  for (const auto& [field, value] : broken) {
    auto bad = good;
    bad[field] = value;
    EXPECT_THROW(plan_from_json(bad.dump()), ArgumentError) << field << " = " << value;
    bad = good;
    bad.erase(field);
    EXPECT_THROW(plan_from_json(bad.dump()), ArgumentError) << "without " << field;
  }
  for (const char* number : {"1e400", "-1e400"}) {  // more than a double holds
    std::string text = good.dump();
    const std::string gamma = "\"gamma\":";
    text.replace(text.find(gamma) + gamma.size(), text.find(',', text.find(gamma)) - text.find(gamma) - gamma.size(),
                 number);
    EXPECT_THROW(plan_from_json(text), ArgumentError) << number;
  }
  const std::vector<std::pair<const char*, nlohmann::json>> too_large = {
      {"bag_of_sequence", {(int64_t{1} << 32) + good["bag_of_sequence"][0].get<int64_t>()}},
      {"degree_of_sequence", {4294967297}},
      {"first_rank_of_sequence", {1e300}},
      {"num_ranks", 18446744073709551615u},
      {"d_model", 1.5}};
  for (const auto& [field, value] : too_large) {  // which would be another number, cut off
    auto bad = good;
    if (value.is_array()) {
      bad[field][0] = value[0];
    } else {
      bad[field] = value;
    }
    EXPECT_THROW(plan_from_json(bad.dump()), ArgumentError) << field << " = " << value;
  }
  auto moved = good;  // well-formed, but a promise is broken
  moved["chunk_lens_of_sequence"][0][0] = moved["chunk_lens_of_sequence"][0][0].get<int64_t>() + 1;
  EXPECT_THROW(plan_from_json(moved.dump()), ArgumentError);
}

TEST(PlanJson, RefusesPairsThatItsMasksDoNotLeave) {
  PlanInput input = lengths_in({{100, 50}, {30}}, "g1n2", 64);
  input.give_masks({Mask::parse("causal"), Mask::parse("full"), Mask::parse("c10 f20")});
  const auto good = nlohmann::json::parse(plan_to_json(plan_micro_batch(input, "balanced")));
  EXPECT_EQ(read(good.dump()).input().attention_pairs, (std::vector<int64_t>{5050, 2500, 655}));
  auto bad = good;
  bad["attention_pairs"][0] = 5051;
  EXPECT_THROW(plan_from_json(bad.dump()), ArgumentError);
  bad = good;
  bad["masks"][2] = "c10 f30";  // of 40 tokens
  EXPECT_THROW(plan_from_json(bad.dump()), ArgumentError);
  bad.erase("masks");
  EXPECT_THROW(plan_from_json(bad.dump()), ArgumentError);
}

}  // namespace
}  // namespace knapformer
