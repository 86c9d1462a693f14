#include "knapformer/core/plan/plan_json.h"

#include <cmath>

#include "knapformer/core/plan/json_fields.h"
#include "knapformer/core/util/error.h"
#include "knapformer/core/util/infinity.h"

namespace knapformer {
namespace {

constexpr std::string_view kFormat = "knapformer.plan/2", kStepFormat = "knapformer.step_plan/1";

/// JSON has no infinity: null stands for it.
Json number(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

template <class T>
Json to_json(const T& value) {
  if constexpr (IsRecord<T>) {
    Json json;
    for_each_field<T>([&](const auto& f) { json[f.name] = to_json(value.*f.member); });
    return json;
  } else if constexpr (std::is_same_v<T, double>) {
    return number(value);
  } else if constexpr (std::is_same_v<T, StepMode>) {
    return step_mode_name(value);
  } else {
    return value;
  }
}

template <class T>
void read(const Json& json, const char* name, T& value) {
  if constexpr (IsRecord<T>) {
    const auto object = json_field<Json>(json, name);
    if (!object.is_object()) throw_argument("plan", text("'", name, "' of type ", object.type_name()), "an object");
    for_each_field<T>([&](const auto& f) { read(object, f.name, value.*f.member); });
  } else if constexpr (std::is_same_v<T, double>) {
    const auto it = json.find(name);
    value = it != json.end() && it->is_null() ? kInfinity : json_field<double>(json, name);
  } else if constexpr (std::is_same_v<T, StepMode>) {
    value = parse_step_mode(json_field<std::string>(json, name));
  } else if (std::is_same_v<T, bool> && !json.contains(name)) {  // cuts_queries: plans of 1.0 have none
  } else {
    value = json_field<T>(json, name);
  }
}

Json loads(const LoadBalance& balance) {
  return {{"wir", number(balance.wir())}, {"max_over_mean", balance.max_over_mean()}};
}

Json lists_of(const SequenceLengths& seq_lens) {
  Json lists = Json::array();
  for (int32_t r = 0; r < seq_lens.num_ranks(); ++r) lists.push_back(seq_lens.lens(Rank(r)));
  return lists;
}

SequenceLengths seq_lens_of(const Json& json) {
  return SequenceLengths::from_lists(json_field<std::vector<std::vector<int64_t>>>(json, "seq_lens"));
}

void add_moved_and_predicted(Json& json, const auto& plan, const PlanPrediction& prediction) {
  json["tokens_moved"] = plan.tokens_moved();
  json["attention_tokens_moved"] = plan.attention_tokens_moved();
  json["predicted_time_s"] = prediction.predicted_time_s;
  json["lower_bound_s"] = prediction.lower_bound_s;
  json["gap"] = prediction.gap();
}

/// Throws ArgumentError where a promise of the plan is broken.
template <class AnyPlan>
AnyPlan valid(AnyPlan plan) {
  try {
    plan.validate();
  } catch (const StateError& error) {
    throw ArgumentError(text("plan: got what is not valid, expected a plan: ", error.what()));
  }
  return plan;
}

Json to_json(const Plan& plan, const PlanPrediction& prediction) {
  Json json;
  json["format"] = kFormat;
  json["solver"] = plan.solver();
  json["topology"] = plan.topology().str();
  json["num_ranks"] = plan.num_ranks();
  PlanInput::for_each_setting(plan.input(), [&](const char* name, const auto& value) { json[name] = to_json(value); });
  json["attention_pairs"] = plan.input().attention_pairs;
  if (!plan.input().masks.empty()) {
    json["masks"] = Json::array();
    for (const Mask& mask : plan.input().masks) json["masks"].push_back(mask.str());
  }
  json["query_cuts"] = Json::array();
  for (const QueryCut& cut : plan.input().query_cuts)
    json["query_cuts"].push_back({cut.degree, cut.num_parts, cut.num_stages});
  if (!plan.input().given_work.empty() || plan.input().token_part != 1) {
    json["work"] = plan.input().given_work;
    json["token_part"] = plan.input().token_part;
  }
  std::vector<std::vector<int64_t>> rank_chunk_lens, sequence_chunk_lens;
  std::vector<int32_t> bags, first_ranks, degrees;
  for (int32_t r = 0; r < plan.num_ranks(); ++r) {
    auto& held = rank_chunk_lens.emplace_back();
    for (const int32_t index : plan.chunks_on(Rank(r))) held.push_back(plan.chunk(index).num_tokens);
  }
  for (int32_t s = 0; s < plan.num_sequences(); ++s) {
    const Placement& place = plan.placement(SequenceId(s));
    bags.push_back(place.bag.value);
    first_ranks.push_back(place.first_rank.value);
    degrees.push_back(place.degree);
    auto& lens = sequence_chunk_lens.emplace_back();
    for (const Chunk& chunk : plan.chunks(SequenceId(s))) lens.push_back(chunk.num_tokens);
  }
  json["seq_lens"] = lists_of(plan.seq_lens());
  json["bag_of_sequence"] = bags;
  json["first_rank_of_sequence"] = first_ranks;
  json["degree_of_sequence"] = degrees;
  json["chunk_lens_of_sequence"] = sequence_chunk_lens;
  json["chunk_lens"] = rank_chunk_lens;
  json["workload_before"] = plan.workload_before();
  json["workload_after"] = plan.workload_after();
  json["tokens_before"] = plan.tokens_before();
  json["tokens_after"] = plan.tokens_after();
  json["balance_before"] = loads(plan.balance_before());
  json["balance_after"] = loads(plan.balance_after());
  add_moved_and_predicted(json, plan, prediction);
  return json;
}

Plan plan_of(const Json& json) {
  PlanInput input{
      .seq_lens = seq_lens_of(json),
      .topology = Topology::parse(json_field<std::string>(json, "topology"), json_field<int64_t>(json, "num_ranks")),
      .workload = {},
      .attention_pairs = json_field<std::vector<int64_t>>(json, "attention_pairs")};
  PlanInput::for_each_setting(input, [&](const char* name, auto& value) { read(json, name, value); });
  if (json.contains("work")) {
    input.given_work = json_field<std::vector<double>>(json, "work");
    input.token_part = json_field<double>(json, "token_part");
  }
  if (json.contains("masks")) {
    for (const auto& mask : json_field<std::vector<std::string>>(json, "masks"))
      input.masks.push_back(Mask::parse(mask));
  }
  if (json.contains("query_cuts")) {
    for (const auto& cut : json_field<std::vector<std::vector<int32_t>>>(json, "query_cuts")) {
      if (cut.size() != 3)
        throw_argument("plan", text("'query_cuts' with ", cut.size(), " numbers"), "3: ranks, parts, stages");
      input.query_cuts.push_back({.degree = cut[0], .num_parts = cut[1], .num_stages = cut[2]});
    }
  }
  input.validate();
  const auto bags = json_field<std::vector<int32_t>>(json, "bag_of_sequence");
  const auto first_ranks = json_field<std::vector<int32_t>>(json, "first_rank_of_sequence");
  const auto degrees = json_field<std::vector<int32_t>>(json, "degree_of_sequence");
  const auto lens = json_field<std::vector<std::vector<int64_t>>>(json, "chunk_lens_of_sequence");
  const auto num_sequences = static_cast<size_t>(input.seq_lens.num_sequences());
  if (bags.size() != num_sequences || first_ranks.size() != num_sequences || degrees.size() != num_sequences ||
      lens.size() != num_sequences) {
    throw_argument("plan",
                   text(bags.size(), " bags, ", first_ranks.size(), " first ranks, ", degrees.size(), " degrees and ",
                        lens.size(), " lists of chunk lengths"),
                   text("one of each for the ", num_sequences, " sequences"));
  }
  std::vector<Placement> placements(num_sequences);
  std::vector<int64_t> chunk_lens;
  for (size_t s = 0; s < num_sequences; ++s) {
    placements[s] = {.bag = BagId(bags[s]), .first_rank = Rank(first_ranks[s]), .degree = degrees[s]};
    const bool in_group =
        degrees[s] >= 1 && first_ranks[s] >= 0 && first_ranks[s] <= input.topology.num_ranks() - degrees[s];
    if (!in_group || lens[s].size() != static_cast<size_t>(degrees[s])) {
      throw_argument(
          "plan",
          text("sequence ", s, " at rank ", first_ranks[s], " with degree ", degrees[s], " and ", lens[s].size(),
               " chunks"),
          text("a group within the ", input.topology.num_ranks(), " ranks, and a chunk for each of its ranks"));
    }
    for (const int64_t length : lens[s]) {
      if (length >= 0 && length <= input.seq_lens[SequenceId(s)]) continue;
      throw_argument("plan", text("a chunk of ", length, " tokens of sequence ", s),
                     text("0 to ", input.seq_lens[SequenceId(s)]));
    }
    chunk_lens.insert(chunk_lens.end(), lens[s].begin(), lens[s].end());
  }
  return valid(
      Plan(std::move(input), json_field<std::string>(json, "solver"), std::move(placements), std::move(chunk_lens)));
}

/// The input of a step, from those of its micro-batches. The shared settings come from the first plan, and masks and
/// work from the plan of each sequence.
StepInput input_of(std::span<const Plan> plans, std::span<const int32_t> micro_batches, SequenceLengths seq_lens) {
  StepInput input{.sequences = plans.front().input(), .num_micro_batches = static_cast<int32_t>(plans.size())};
  input.sequences.seq_lens = std::move(seq_lens);
  input.sequences.attention_pairs.clear();
  input.sequences.masks.clear();
  input.sequences.given_work.clear();
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
  return input;
}

StepPlan step_of(const Json& json) {
  SequenceLengths seq_lens = seq_lens_of(json);
  auto micro_batches = json_field<std::vector<int32_t>>(json, "micro_batch_of_sequence");
  std::vector<Plan> plans;
  for (const Json& plan : json_field<std::vector<Json>>(json, "plans")) {
    check_format(plan, kFormat);
    plans.push_back(plan_of(plan));
  }
  if (plans.empty() || std::ssize(micro_batches) != seq_lens.num_sequences()) {
    throw_argument("plan", text(plans.size(), " plans, and micro-batches of ", micro_batches.size(), " sequences"),
                   text("at least one plan, and micro-batches of the ", seq_lens.num_sequences(), " sequences"));
  }
  StepInput input = input_of(plans, micro_batches, std::move(seq_lens));
  input.sync = parse_step_sync(json_field<std::string>(json, "sync"));
  return valid(StepPlan(std::move(input), std::move(micro_batches), std::move(plans)));
}

}  // namespace

std::string plan_to_json(const StepPlan& plan, const PlanPrediction& prediction,
                         std::span<const PlanPrediction> of_plans) {
  if (plan.num_micro_batches() == 1) return to_json(plan.plans()[0], of_plans[0]).dump();
  Json json;
  json["format"] = kStepFormat;
  json["sync"] = step_sync_name(plan.input().sync);
  json["seq_lens"] = lists_of(plan.seq_lens());
  json["micro_batch_of_sequence"] = plan.micro_batches();
  json["plans"] = Json::array();
  for (size_t k = 0; k < plan.plans().size(); ++k) json["plans"].push_back(to_json(plan.plans()[k], of_plans[k]));
  json["max_tokens"] = plan.max_tokens();
  json["exchanged_fraction"] = plan.exchanged_fraction();
  add_moved_and_predicted(json, plan, prediction);
  return json.dump();
}

StepPlan plan_from_json(std::string_view json_text) {
  const Json json = parse_json(json_text);
  if (json.value("format", Json()) == kStepFormat) return step_of(json);
  check_format(json, kFormat);
  return StepPlan(plan_of(json));
}

}  // namespace knapformer
