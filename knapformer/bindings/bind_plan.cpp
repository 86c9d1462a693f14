#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include "knapformer/bindings/arguments.h"
#include "knapformer/bindings/core_bindings.h"
#include "knapformer/core/cost/bounds.h"
#include "knapformer/core/cost/step_time.h"
#include "knapformer/core/plan/plan.h"
#include "knapformer/core/plan/plan_json.h"
#include "knapformer/core/util/error.h"

namespace py = pybind11;
using namespace knapformer;  // NOLINT: this file is nothing but names of the core

namespace {

template <class T>
auto listed(std::span<const T> (Plan::*values)() const) {
  return [values](const Plan& plan) { return std::vector<T>((plan.*values)().begin(), (plan.*values)().end()); };
}

/// By rank, a value for each chunk there, in row order.
template <class Field>
auto per_chunk(Field field) {
  return [field](const Plan& plan) {
    std::vector<std::vector<int64_t>> out(static_cast<size_t>(plan.num_ranks()));
    for (int32_t r = 0; r < plan.num_ranks(); ++r) {
      for (const int32_t index : plan.chunks_on(Rank(r))) out[r].push_back(field(plan.chunk(index)));
    }
    return out;
  };
}

py::list chunks(const Plan& plan) {
  py::list out(plan.chunks().size());
  for (size_t i = 0; i < plan.chunks().size(); ++i) {
    const Chunk& c = plan.chunks()[i];
    out[i] = py::make_tuple(c.sequence.value, c.rank.value, c.first_token, c.num_tokens);
  }
  return out;
}

std::vector<double> sequence_works(const Plan& plan) {
  std::vector<double> works;
  for (int32_t s = 0; s < plan.num_sequences(); ++s) works.push_back(plan.input().work(SequenceId(s)));
  return works;
}

Plan on(const Plan& plan, const py::object& cluster, const py::object& model, const py::object& gamma) {
  PlanInput input = plan.input();
  if (!cluster.is_none()) input.cluster = cluster_from(cluster);
  if (!model.is_none()) input.model = model_from(model);
  if (!gamma.is_none()) input.workload.gamma = number_from(gamma, "gamma");
  input.validate();
  return Plan(std::move(input), plan.solver(), {plan.placements().begin(), plan.placements().end()}, plan.chunk_lens());
}

std::vector<double> chunk_works(const Plan& plan) {
  const PlanInput& input = plan.input();
  const AttentionShares shares = input.attention_shares();
  std::vector<double> works;
  works.reserve(plan.chunks().size());
  for (const Chunk& chunk : plan.chunks()) {
    const Placement& place = plan.placement(chunk.sequence);
    const int32_t index = chunk.rank.value - place.first_rank.value;
    works.push_back(input.token_work(chunk.num_tokens) +
                    shares.part(input.attention_work(chunk.sequence), place.degree, index));
  }
  return works;
}

template <class Field>
auto per_sequence(Field field) {
  return [field](const Plan& plan) {
    std::vector<int32_t> out;
    out.reserve(plan.placements().size());
    for (const Placement& p : plan.placements()) out.push_back(field(p));
    return out;
  };
}

std::string describe(const Plan& plan) {
  return text("Plan(topology='", plan.topology().str(), "', solver='", plan.solver(), "', num_ranks=", plan.num_ranks(),
              ", num_sequences=", plan.num_sequences(), ", num_tokens=", plan.num_tokens(),
              ", wir_before=", plan.balance_before().wir(), ", wir_after=", plan.balance_after().wir(), ")");
}

}  // namespace

void bind_plan(py::module_& m) {
  py::class_<Plan, std::shared_ptr<Plan>>(
      m, "Plan", "Which ranks hold which tokens of every sequence. Constant; equal inputs give equal plans.")
      .def_property_readonly("topology", &Plan::topology, "The bags, over all ranks.")
      .def_property_readonly(
          "workload", [](const Plan& p) { return p.input().workload; }, "The FLOP formula that the plan was made with.")
      .def_property_readonly(
          "d_model", [](const Plan& p) { return p.input().d_model; }, "Width of the blocks, in features.")
      .def_property_readonly("solver", &Plan::solver, "The name of the solver that made the plan.")
      .def_property_readonly("num_ranks", &Plan::num_ranks, "How many ranks all replicas have.")
      .def_property_readonly("num_sequences", &Plan::num_sequences, "How many sequences all ranks have.")
      .def_property_readonly("num_tokens", &Plan::num_tokens, "How many tokens all sequences have.")
      .def_property_readonly(
          "seq_lens",
          [](const Plan& p) {
            std::vector<std::vector<int64_t>> lens;
            for (int32_t r = 0; r < p.num_ranks(); ++r) {
              const auto of_rank = p.seq_lens().lens(Rank(r));
              lens.emplace_back(of_rank.begin(), of_rank.end());
            }
            return lens;
          },
          "Per home rank, the lengths of its sequences, in tokens.")
      .def_property_readonly("bag_of_sequence", per_sequence([](const Placement& p) { return p.bag.value; }),
                             "Per sequence, the number of the bag that holds it.")
      .def_property_readonly("first_rank_of_sequence",
                             per_sequence([](const Placement& p) { return p.first_rank.value; }),
                             "Per sequence, the first of the consecutive ranks that hold it.")
      .def_property_readonly("degree_of_sequence", per_sequence([](const Placement& p) { return p.degree; }),
                             "How many consecutive ranks share each sequence.")
      .def_property_readonly("chunk_lens", per_chunk([](const Chunk& c) { return c.num_tokens; }),
                             "Per rank, the tokens of the chunks that it holds, in row order.")
      .def_property_readonly("sequences_on", per_chunk([](const Chunk& c) { return c.sequence.value; }),
                             "Per rank, the sequence of each of its chunks, in row order.")
      .def_property_readonly("chunks", &chunks, "Tuples (sequence, rank, first token, tokens), in sequence order.")
      .def_property_readonly("workload_before", listed(&Plan::workload_before),
                             "Per rank, FLOPs of one block forward where every sequence stays at home.")
      .def_property_readonly("workload_after", listed(&Plan::workload_after),
                             "Per rank, FLOPs of one block forward under the plan.")
      .def_property_readonly("tokens_before", listed(&Plan::tokens_before),
                             "Per rank, the tokens of its own sequences.")
      .def_property_readonly("tokens_after", listed(&Plan::tokens_after),
                             "Per rank, the tokens that it holds under the plan.")
      .def_property_readonly(
          "wir_before", [](const Plan& p) { return p.balance_before().wir(); },
          "Highest over lowest workload of a rank; infinite where a rank has none.")
      .def_property_readonly(
          "wir_after", [](const Plan& p) { return p.balance_after().wir(); }, "The same under the plan.")
      .def_property_readonly(
          "max_over_mean_before", [](const Plan& p) { return p.balance_before().max_over_mean(); },
          "Highest workload of a rank over the mean, where every sequence stays at home; 1 is even.")
      .def_property_readonly(
          "max_over_mean_after", [](const Plan& p) { return p.balance_after().max_over_mean(); },
          "The same under the plan.")
      .def_property_readonly("tokens_moved", &Plan::tokens_moved, "Tokens held by another rank than their home.")
      .def_property_readonly("attention_tokens_moved", &Plan::attention_tokens_moved,
                             "Tokens that leave their rank in each all-to-all of an attention.")
      .def_property_readonly(
          "predicted_time", [](const Plan& p) { return predict_step(p).total_s(); },
          "Predicted seconds of a step: total_s of predict_step.")
      .def_property_readonly(
          "lower_bound", [](const Plan& p) { return lower_bound_s(p.input()); },
          "No plan of these sequences and this topology takes fewer seconds.")
      .def_property_readonly(
          "gap", [](const Plan& p) { return prediction_of(p).gap(); },
          "predicted_time / lower_bound - 1: how far from the best this plan may be.")
      .def_property_readonly(
          "ideal_time", [](const Plan& p) { return predict_step(p).ideal_step_s(); },
          "Seconds of a step with the work spread evenly and no exchange, plus the fixed time.")
      .def_property_readonly("max_tokens", &Plan::max_tokens, "Tokens of the fullest rank.")
      .def_property_readonly(
          "cluster", [](const Plan& p) { return p.input().cluster; }, "The cluster that times are predicted with.")
      .def_property_readonly(
          "model", [](const Plan& p) { return p.input().model; }, "The model that a step runs.")
      .def("on", &on, py::arg("cluster") = py::none(), py::arg("model") = py::none(), py::arg("gamma") = py::none(),
           "The same decision on another cluster, for another model, or at another gamma: None leaves the plan's own. "
           "Raises ArgumentError.")
      .def_property_readonly("sequence_works", &sequence_works, "Per sequence, FLOPs of one block forward.")
      .def_property_readonly("chunk_works", &chunk_works,
                             "For each of `chunks`, FLOPs of one block forward that are done on its rank.")
      .def_property_readonly(
          "attention_pairs", [](const Plan& p) { return p.input().attention_pairs; },
          "Per sequence, how many (query, key) pairs its mask leaves. Empty: full attention everywhere.")
      .def("validate", &Plan::validate, "Checks every promise of a plan; raises StateError with the first one broken.")
      .def(
          "to_json", [](const Plan& p) { return plan_to_json(p, prediction_of(p)); },
          "The plan as text, to be read by from_json.")
      .def_static(
          "from_json", [](const py::object& json) { return plan_from_json(text_from(json, "json")); }, py::arg("json"),
          "The plan that to_json wrote. Raises ArgumentError where the text holds no plan, or no valid one.")
      .def(py::self == py::self)
      .def(py::pickle([](const Plan& p) { return py::str(plan_to_json(p, {})); },
                      [](const py::str& s) { return plan_from_json(s.cast<std::string>()); }))
      .def("__repr__", &describe);
}
