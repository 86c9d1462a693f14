#include "knapformer/core/cost/plan_json.h"

#include <concepts>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "knapformer/core/cost/bounds.h"
#include "knapformer/core/util/error.h"

namespace knapformer {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kFormat = "knapformer.plan/2", kStepFormat = "knapformer.step_plan/1";

template <class T>
Json to_json(const T& value) {
  if constexpr (IsRecord<T>) {
    Json json;
    for_each_field<T>([&](const auto& f) { json[f.name] = to_json(value.*f.member); });
    return json;
  } else if constexpr (std::same_as<T, StepMode>) {
    return step_mode_name(value);
  } else {
    return value;  // JSON has no infinity: null is written for it
  }
}

template <class T>
T field_of(const Json& object, const char* name);

/// The value of a field. One that has another type, or is too large for its place (where the library's get<T>() would
/// truncate it), causes an ArgumentError that names it.
template <class T>
T value_of(const Json& json, const char* name) {
  const auto refuse = [&](const std::string& expected) {
    throw_argument(
        "plan",
        text("'", name, json.is_number() ? "' with " : "' of type ", json.is_number() ? json.dump() : json.type_name()),
        expected);
  };
  if constexpr (IsRecord<T>) {
    if (!json.is_object()) refuse("an object");
    T record;
    for_each_field<T>([&](const auto& f) {
      using Member = std::remove_cvref_t<decltype(record.*f.member)>;
      const std::string_view member = f.name;  // plans of 1.0 have not these two
      if ((member == "cuts_queries" || member == "max_stage_bytes") && !json.contains(f.name)) return;
      record.*f.member = field_of<Member>(json, f.name);
    });
    return record;
  } else if constexpr (std::same_as<T, StepMode>) {
    return parse_step_mode(value_of<std::string>(json, name));
  } else if constexpr (std::same_as<T, Json>) {
    return json;
  } else if constexpr (std::same_as<T, double>) {
    if (!json.is_number() && !json.is_null()) refuse("a number");
    return json.is_null() ? kInfinity : json.get<T>();
  } else if constexpr (std::same_as<T, bool> || std::same_as<T, std::string>) {
    if (json.get_ptr<const T*>() == nullptr) refuse("what a plan has there");
    return json.get<T>();
  } else if constexpr (std::integral<T>) {
    if (!json.is_number_integer()) refuse("integers");
    const bool fits =
        json.is_number_unsigned() ? std::in_range<T>(json.get<uint64_t>()) : std::in_range<T>(json.get<int64_t>());
    if (!fits) refuse(text("integers from ", std::numeric_limits<T>::min(), " to ", std::numeric_limits<T>::max()));
    return json.get<T>();
  } else {
    if (!json.is_array()) refuse("a list");
    T values;
    values.reserve(json.size());
    for (const Json& item : json) values.push_back(value_of<typename T::value_type>(item, name));
    return values;
  }
}

template <class T>
T field_of(const Json& object, const char* name) {
  const auto it = object.find(name);
  if (it == object.end()) throw_argument("plan", text("JSON without '", name, "'"), "a plan as knapformer writes it");
  return value_of<T>(*it, name);
}

Json parse_json(std::string_view json_text) {
  Json json;
  try {
    json = Json::parse(json_text, [](int depth, Json::parse_event_t, Json&) {
      constexpr int kMostNested = 32;  // copies and destructors recurse
      if (depth > kMostNested)
        throw_argument("plan", text("JSON of more than ", kMostNested, " levels"), "a plan as JSON");
      return true;
    });
  } catch (const nlohmann::json::parse_error& error) {
    throw_argument("plan", text("malformed JSON at byte ", error.byte), "a plan as JSON");
  } catch (const nlohmann::json::exception& error) {  // a number that overflows
    throw_argument("plan", text("JSON that cannot be read (", error.what(), ")"), "numbers in the range of a double");
  }
  if (!json.is_object()) throw_argument("plan", text("JSON of type ", json.type_name()), "an object");
  return json;
}

template <class T>
std::vector<T> per_sequence(const Json& json, const char* name, size_t num_sequences) {
  auto values = field_of<std::vector<T>>(json, name);
  if (values.size() == num_sequences) return values;
  throw_argument("plan", text("'", name, "' with ", values.size(), " values"),
                 text("one for each of the ", num_sequences, " sequences"));
}

void check_format(const Json& json, std::string_view format) {
  const auto got = field_of<std::string>(json, "format");
  if (got != format) throw_argument("plan", text("format '", got, "'"), text("'", format, "'"));
}

Json loads(const LoadBalance& balance) { return {{"wir", balance.wir()}, {"max_over_mean", balance.max_over_mean()}}; }

Json lists_of(const SequenceLengths& seq_lens) {
  Json lists = Json::array();
  for (int32_t r = 0; r < seq_lens.num_ranks(); ++r) lists.push_back(seq_lens.lens(Rank(r)));
  return lists;
}

SequenceLengths seq_lens_of(const Json& json) {
  return SequenceLengths::from_lists(field_of<std::vector<std::vector<int64_t>>>(json, "seq_lens"));
}

void add_moved_and_predicted(Json& json, const Plan& plan) {
  const PlanPrediction prediction = prediction_of(plan);
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

Json json_of(const MicroBatchPlan& plan) {
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
  json["attention_cuts"] = Json::array();
  for (const AttentionCut& cut : plan.input().attention_cuts)
    json["attention_cuts"].push_back({cut.degree, cut.num_parts, cut.num_stages});
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
  add_moved_and_predicted(json, plan);
  return json;
}

MicroBatchPlan plan_of(const Json& json) {
  PlanInput input{
      .seq_lens = seq_lens_of(json),
      .topology = Topology::parse(field_of<std::string>(json, "topology"), field_of<int64_t>(json, "num_ranks"))};
  const auto num_sequences = static_cast<size_t>(input.seq_lens.num_sequences());
  PlanInput::for_each_setting(
      input, [&]<class Value>(const char* name, Value& value) { value = field_of<Value>(json, name); });
  if (json.contains("work")) {
    input.given_work = field_of<std::vector<double>>(json, "work");
    input.token_part = field_of<double>(json, "token_part");
  }
  if (json.contains("masks")) {
    std::vector<Mask> masks;
    for (const auto& mask : per_sequence<std::string>(json, "masks", num_sequences)) masks.push_back(Mask::parse(mask));
    input.give_masks(std::move(masks));
  }
  if (field_of<std::vector<int64_t>>(json, "attention_pairs") != input.attention_pairs)
    throw_argument("plan", "other 'attention_pairs' than 'masks' leave", "those of the masks, none without masks");
  if (json.contains("attention_cuts")) {
    for (const auto& cut : field_of<std::vector<std::vector<int32_t>>>(json, "attention_cuts")) {
      if (cut.size() != 3)
        throw_argument("plan", text("'attention_cuts' with ", cut.size(), " numbers"), "3: ranks, parts, stages");
      input.attention_cuts.push_back({.degree = cut[0], .num_parts = cut[1], .num_stages = cut[2]});
    }
  }
  input.validate();
  const auto bags = per_sequence<int32_t>(json, "bag_of_sequence", num_sequences);
  const auto first_ranks = per_sequence<int32_t>(json, "first_rank_of_sequence", num_sequences);
  const auto degrees = per_sequence<int32_t>(json, "degree_of_sequence", num_sequences);
  const auto lens = per_sequence<std::vector<int64_t>>(json, "chunk_lens_of_sequence", num_sequences);
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
  return valid(MicroBatchPlan(std::move(input), field_of<std::string>(json, "solver"), std::move(placements),
                              std::move(chunk_lens)));
}

/// The input of a step, from those of its micro-batches.
StepInput input_of(std::span<const MicroBatchPlan> plans, std::span<const int32_t> micro_batches,
                   SequenceLengths seq_lens) {
  StepInput input{.sequences = plans.front().input().without_sequences(),
                  .num_micro_batches = static_cast<int32_t>(plans.size())};
  input.sequences.seq_lens = std::move(seq_lens);
  std::vector<int32_t> next(plans.size());
  for (const int32_t k : micro_batches) {
    if (k < 0 || k >= input.num_micro_batches || next[k] >= plans[k].num_sequences()) {
      throw_argument("plan", text("a sequence of micro-batch ", k, " that no plan has"),
                     text("each sequence in one of the ", plans.size(), " plans"));
    }
    input.sequences.append_given(plans[k].input(), SequenceId(next[k]++));
  }
  input.validate();
  return input;
}

Plan step_of(const Json& json) {
  SequenceLengths seq_lens = seq_lens_of(json);
  auto micro_batches = per_sequence<int32_t>(json, "micro_batch_of_sequence", seq_lens.lens().size());
  std::vector<MicroBatchPlan> plans;
  for (const Json& plan : field_of<std::vector<Json>>(json, "plans")) {
    check_format(plan, kFormat);
    plans.push_back(plan_of(plan));
  }
  if (plans.empty()) throw_argument("plan", "'plans' with none", "a plan for each micro-batch");
  StepInput input = input_of(plans, micro_batches, std::move(seq_lens));
  input.sync = parse_step_sync(field_of<std::string>(json, "sync"));
  return valid(Plan(std::move(input), std::move(micro_batches), std::move(plans)));
}

}  // namespace

std::string plan_to_json(const Plan& plan) {
  if (plan.num_micro_batches() == 1) return json_of(plan.plans()[0]).dump();
  Json json;
  json["format"] = kStepFormat;
  json["sync"] = step_sync_name(plan.input().sync);
  json["seq_lens"] = lists_of(plan.seq_lens());
  json["micro_batch_of_sequence"] = plan.micro_batches();
  json["plans"] = Json::array();
  for (const MicroBatchPlan& micro_batch : plan.plans()) json["plans"].push_back(json_of(micro_batch));
  json["max_tokens"] = plan.max_tokens();
  json["exchanged_fraction"] = plan.exchanged_fraction();
  add_moved_and_predicted(json, plan);
  return json.dump();
}

Plan plan_from_json(std::string_view json_text) {
  const Json json = parse_json(json_text);
  if (json.value("format", Json()) == kStepFormat) return step_of(json);
  check_format(json, kFormat);
  return plan_of(json);
}

std::vector<std::pair<std::string, std::string>> setting_texts(const PlanInput& input) {
  std::vector<std::pair<std::string, std::string>> texts;
  PlanInput::for_each_setting(input, [&](const std::string& name, const auto& value) {
    const Json json = to_json(value);
    if (!json.is_object()) return static_cast<void>(texts.emplace_back(name, json.dump()));
    for (const auto& field : json.items()) texts.emplace_back(name + "." + field.key(), field.value().dump());
  });
  return texts;
}

}  // namespace knapformer
