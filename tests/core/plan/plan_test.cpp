// The plan of a step as a value: its parts, its promises and its JSON.
#include "knapformer/core/plan/plan.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "knapformer/core/cost/plan_json.h"
#include "knapformer/core/util/error.h"
#include "tests/core/cases.h"

namespace knapformer {
namespace {

StepInput two_ranks() {
  StepInput input{
      .sequences = lengths_in({{10, 20, 30}, {40, 50}}, "g2/1n1", 8), .num_micro_batches = 2, .sync = StepSync::kStep};
  input.sequences.give_mask(Mask::parse("causal"));
  return input;
}

Plan planned(const StepInput& input, std::vector<int32_t> micro_batches) {
  std::vector<MicroBatchPlan> plans;
  for (const PlanInput& part : micro_batch_inputs(input, micro_batches)) plans.push_back(balanced(part));
  return Plan(input, std::move(micro_batches), std::move(plans));
}

TEST(Plan, PartsKeepOrderHomesAndMasks) {
  const std::vector<PlanInput> parts = micro_batch_inputs(two_ranks(), std::vector<int32_t>{1, 0, 1, 1, 0});
  ASSERT_EQ(parts.size(), 2);
  EXPECT_EQ(parts[0].seq_lens, SequenceLengths::from_lists({{20}, {50}}));
  EXPECT_EQ(parts[1].seq_lens, SequenceLengths::from_lists({{10, 30}, {40}}));
  EXPECT_EQ(parts[0].attention_pairs, (std::vector<int64_t>{210, 1275}));
  EXPECT_EQ(parts[1].attention_pairs, (std::vector<int64_t>{55, 465, 820}));
  EXPECT_EQ(parts[1].d_model, 8);
}

TEST(Plan, AsGivenCutsEachListIntoConsecutiveParts) {
  const auto lens = SequenceLengths::from_lists({{1, 1, 1, 1, 1}, {}, {1}});
  EXPECT_EQ(micro_batches_as_given(lens, 2), (std::vector<int32_t>{0, 0, 0, 1, 1, 0}));
  EXPECT_EQ(micro_batches_as_given(lens, 3), (std::vector<int32_t>{0, 0, 1, 1, 2, 0}));
  EXPECT_EQ(micro_batches_as_given(lens, 1), (std::vector<int32_t>(6, 0)));
}

TEST(Plan, MeasuresAreOfTheWholeStep) {
  const Plan plan = planned(two_ranks(), {1, 0, 1, 1, 0});
  plan.validate();
  EXPECT_EQ(plan.num_tokens(), 150);
  EXPECT_EQ(plan.sequences_of(1), (std::vector<SequenceId>{SequenceId(0), SequenceId(2), SequenceId(3)}));
  EXPECT_EQ(plan.max_tokens(), std::max(plan.plans()[0].max_tokens(), plan.plans()[1].max_tokens()));
  EXPECT_EQ(plan.tokens_moved(), plan.plans()[0].tokens_moved() + plan.plans()[1].tokens_moved());
  EXPECT_DOUBLE_EQ(plan.exchanged_fraction(), plan.attention_tokens_moved() / 150);
}

TEST(Plan, ValidateSeesPlansOfOtherSequences) {
  const StepInput input = two_ranks();
  const Plan plan = planned(input, {1, 0, 1, 1, 0});
  const std::vector<MicroBatchPlan> plans(plan.plans().begin(), plan.plans().end());
  EXPECT_THROW(Plan(input, {0, 0, 1, 1, 0}, plans).validate(), StateError);
  EXPECT_THROW(Plan(input, {1, 0, 1, 1, 2}, plans).validate(), StateError);
  StepInput other = input;
  other.sequences.workload.gamma = 1;
  EXPECT_THROW(Plan(other, {1, 0, 1, 1, 0}, plans).validate(), StateError);
}

TEST(Plan, JsonHoldsIt) {
  const Plan plan = planned(two_ranks(), {1, 0, 1, 1, 0});
  const std::string json = plan_to_json(plan);
  EXPECT_EQ(plan_from_json(json), plan);
  const auto parsed = nlohmann::json::parse(json);
  EXPECT_EQ(parsed["format"], "knapformer.step_plan/1");
  EXPECT_EQ(parsed["sync"], "step");
  EXPECT_EQ(parsed["micro_batch_of_sequence"], (std::vector<int32_t>{1, 0, 1, 1, 0}));
  EXPECT_EQ(parsed["plans"].size(), 2);
  EXPECT_GT(parsed["lower_bound_s"], 0);
  EXPECT_EQ(parsed["gap"], parsed["predicted_time_s"].get<double>() / parsed["lower_bound_s"].get<double>() - 1);
}

TEST(Plan, JsonKeepsPairsThatNoDoubleHolds) {
  constexpr int64_t kLength = 200'000'001;  // of n (n + 1) / 2 pairs: above 2^53, and odd
  StepInput input{.sequences = lengths_in({{kLength, kLength}}, "g1n1", 64), .num_micro_batches = 2};
  input.sequences.give_mask(Mask::parse("causal"));
  const Plan plan = planned(input, {0, 1});
  EXPECT_EQ(plan_from_json(plan_to_json(plan)), plan);
}

TEST(Plan, JsonThatIsNoneNamesTheField) {
  const Plan plan = planned(two_ranks(), {1, 0, 1, 1, 0});
  const auto json = nlohmann::json::parse(plan_to_json(plan));
  const auto refused = [&](const char* name, const nlohmann::json& value) {
    nlohmann::json changed = json;
    changed[name] = value;
    EXPECT_THROW(plan_from_json(changed.dump()), ArgumentError) << name << ": " << value;
    changed.erase(name);
    EXPECT_THROW(plan_from_json(changed.dump()), ArgumentError) << name;
  };
  refused("format", "knapformer.plan/2");
  refused("sync", "never");
  refused("plans", nlohmann::json::array());
  refused("seq_lens", {{10, 20, 30}, {40, 51}});
  refused("micro_batch_of_sequence", {1, 0, 1, 1});
  refused("micro_batch_of_sequence", {1, 0, 1, 1, 2});
  refused("micro_batch_of_sequence", {1, 1, 1, 1, 0});
  EXPECT_THROW(plan_from_json("{"), ArgumentError);
  EXPECT_THROW(plan_from_json("[]"), ArgumentError);
}

TEST(Plan, SyncHasTwoNames) {
  for (const StepSync sync : {StepSync::kMicroBatch, StepSync::kStep})
    EXPECT_EQ(parse_step_sync(step_sync_name(sync)), sync);
  EXPECT_THROW(parse_step_sync("block"), ArgumentError);
}

}  // namespace
}  // namespace knapformer
