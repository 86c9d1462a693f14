#include "knapformer/core/plan/plan_json.h"

#include <cmath>

#include "knapformer/core/plan/json_fields.h"
#include "knapformer/core/util/error.h"
#include "knapformer/core/util/infinity.h"

namespace knapformer {
namespace {

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

}  // namespace

std::string plan_to_json(const Plan& plan, const PlanPrediction& prediction) {
  Json json;
  json["format"] = kPlanFormat;
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
  std::vector<std::vector<int64_t>> seq_lens, rank_chunk_lens, sequence_chunk_lens;
  std::vector<int32_t> bags, first_ranks, degrees;
  for (int32_t r = 0; r < plan.num_ranks(); ++r) {
    const auto lens = plan.seq_lens().lens(Rank(r));
    seq_lens.emplace_back(lens.begin(), lens.end());
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
  json["seq_lens"] = seq_lens;
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
  json["tokens_moved"] = plan.tokens_moved();
  json["attention_tokens_moved"] = plan.attention_tokens_moved();
  json["predicted_time_s"] = prediction.predicted_time_s;
  json["lower_bound_s"] = prediction.lower_bound_s;
  json["gap"] = prediction.gap();
  return json.dump();
}

Plan plan_from_json(std::string_view json_text) {
  const Json json = parse_json(json_text, kPlanFormat);
  PlanInput input{
      .seq_lens = SequenceLengths::from_lists(json_field<std::vector<std::vector<int64_t>>>(json, "seq_lens")),
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
  Plan plan(std::move(input), json_field<std::string>(json, "solver"), std::move(placements), std::move(chunk_lens));
  try {
    plan.validate();
  } catch (const StateError& error) {
    throw ArgumentError(error.what());
  }
  return plan;
}

}  // namespace knapformer
