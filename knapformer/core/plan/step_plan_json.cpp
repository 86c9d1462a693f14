#include "knapformer/core/plan/step_plan_json.h"

#include <algorithm>

#include "knapformer/core/plan/json_fields.h"
#include "knapformer/core/util/error.h"

namespace knapformer {
namespace {

constexpr std::string_view kStepPlanFormat = "knapformer.step_plan/1";

}  // namespace

std::string step_plan_to_json(const StepPlan& plan, const PlanPrediction& prediction,
                              std::span<const PlanPrediction> of_plans) {
  if (plan.num_micro_batches() == 1) return plan_to_json(plan.plans()[0], of_plans[0]);
  Json json;
  json["format"] = kStepPlanFormat;
  json["sync"] = step_sync_name(plan.input().sync);
  const SequenceLengths& seq_lens = plan.seq_lens();
  std::vector<std::vector<int64_t>> lists;
  for (int32_t r = 0; r < seq_lens.num_ranks(); ++r) {
    const auto lens = seq_lens.lens(Rank(r));
    lists.emplace_back(lens.begin(), lens.end());
  }
  json["seq_lens"] = lists;
  json["micro_batch_of_sequence"] = plan.micro_batches();
  json["plans"] = Json::array();
  for (size_t k = 0; k < plan.plans().size(); ++k)
    json["plans"].push_back(Json::parse(plan_to_json(plan.plans()[k], of_plans[k])));
  json["max_tokens"] = plan.max_tokens();
  json["tokens_moved"] = plan.tokens_moved();
  json["attention_tokens_moved"] = plan.attention_tokens_moved();
  json["exchanged_fraction"] = plan.exchanged_fraction();
  json["predicted_time_s"] = prediction.predicted_time_s;
  json["lower_bound_s"] = prediction.lower_bound_s;
  json["gap"] = prediction.gap();
  return json.dump();
}

StepPlan step_plan_from_json(std::string_view json_text) {
  const Json json = parse_json(json_text, kPlanFormat, kStepPlanFormat);
  if (json["format"] == kPlanFormat) return StepPlan(std::make_shared<const Plan>(plan_from_json(json_text)));
  StepInput input;
  input.sync = parse_step_sync(json_field<std::string>(json, "sync"));
  SequenceLengths seq_lens =
      SequenceLengths::from_lists(json_field<std::vector<std::vector<int64_t>>>(json, "seq_lens"));
  auto micro_batches = json_field<std::vector<int32_t>>(json, "micro_batch_of_sequence");
  std::vector<Plan> plans;
  for (const Json& plan : json_field<std::vector<Json>>(json, "plans")) plans.push_back(plan_from_json(plan.dump()));
  if (plans.empty() || std::ssize(micro_batches) != seq_lens.num_sequences()) {
    throw_argument("plan", text(plans.size(), " plans, and micro-batches of ", micro_batches.size(), " sequences"),
                   text("at least one plan, and micro-batches of the ", seq_lens.num_sequences(), " sequences"));
  }
  // The shared settings come from the first plan, and masks and work from the plan of each sequence.
  input.sequences = plans.front().input();
  input.sequences.seq_lens = std::move(seq_lens);
  input.sequences.attention_pairs.clear();
  input.sequences.masks.clear();
  input.sequences.given_work.clear();
  input.num_micro_batches = static_cast<int32_t>(plans.size());
  const bool has_pairs =
      std::ranges::any_of(plans, [](const Plan& plan) { return !plan.input().attention_pairs.empty(); });
  const bool has_masks = std::ranges::any_of(plans, [](const Plan& plan) { return !plan.input().masks.empty(); });
  const bool has_work = std::ranges::any_of(plans, [](const Plan& plan) { return !plan.input().given_work.empty(); });
  std::vector<size_t> next(plans.size(), 0);
  for (const int32_t k : micro_batches) {
    if (k < 0 || k >= input.num_micro_batches || next[k] >= plans[k].seq_lens().lens().size()) {
      throw_argument("plan", text("a sequence of micro-batch ", k, " that no plan has"),
                     text("each sequence in one of the ", plans.size(), " plans"));
    }
    const SequenceId id(next[k]++);
    const PlanInput& part = plans[k].input();
    if (has_pairs) {
      const int64_t length = part.seq_lens[id];
      input.sequences.attention_pairs.push_back(part.attention_pairs.empty() ? length * length
                                                                             : part.attention_pairs[id.index()]);
    }
    if (has_masks) input.sequences.masks.push_back(part.mask_of(id).value_or(Mask()));
    if (has_work) input.sequences.given_work.push_back(part.work(id));
  }
  input.validate();
  StepPlan plan(std::move(input), std::move(micro_batches), std::move(plans));
  try {
    plan.validate();
  } catch (const StateError& error) {
    throw ArgumentError(text("plan: got what is not valid, expected a plan: ", error.what()));
  }
  return plan;
}

}  // namespace knapformer
