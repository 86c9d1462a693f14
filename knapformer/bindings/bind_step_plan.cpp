#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include "knapformer/bindings/arguments.h"
#include "knapformer/bindings/core_bindings.h"
#include "knapformer/core/cost/accumulation.h"
#include "knapformer/core/cost/bounds.h"
#include "knapformer/core/plan/step_plan.h"
#include "knapformer/core/plan/step_plan_json.h"
#include "knapformer/core/planners/whole_step/fill_ranks.h"
#include "knapformer/core/planners/whole_step/micro_batches.h"
#include "knapformer/core/util/error.h"

namespace py = pybind11;
using namespace knapformer;  // NOLINT: this file is nothing but names of the core

namespace {

std::string to_json(const StepPlan& plan) {
  std::vector<PlanPrediction> of_plans;
  for (const Plan& micro_batch : plan.plans()) of_plans.push_back(prediction_of(micro_batch));
  return step_plan_to_json(plan, prediction_of(plan), of_plans);
}

std::string describe_step(const StepPlan& plan) {
  return text("StepPlan(num_micro_batches=", plan.num_micro_batches(), ", sync='", step_sync_name(plan.input().sync),
              "', topology='", plan.input().sequences.topology.str(), "', num_sequences=", plan.micro_batches().size(),
              ", num_tokens=", plan.num_tokens(), ", max_tokens=", plan.max_tokens(), ")");
}

int32_t micro_batch_from(const StepPlan& plan, py::handle micro_batch) {
  return integer_from<int32_t>(micro_batch, "micro_batch", 0, plan.num_micro_batches() - 1);
}

Rank rank_from(const StepPlan& plan, py::handle rank) {
  return Rank(integer_from<int32_t>(rank, "rank", 0, plan.input().sequences.seq_lens.num_ranks() - 1));
}

std::vector<int32_t> values_of(const std::vector<SequenceId>& ids) {
  std::vector<int32_t> values;
  for (const SequenceId id : ids) values.push_back(id.value);
  return values;
}

}  // namespace

void bind_step_plan(py::module_& m) {
  py::class_<StepPlan, std::shared_ptr<StepPlan>>(
      m, "StepPlan",
      "An optimizer step of several micro-batches: which of them computes each sequence, and a Plan "
      "of each. Constant;\nequal inputs give equal plans.")
      .def_property_readonly(
          "micro_batches",
          [](const StepPlan& p) { return std::vector<int32_t>(p.micro_batches().begin(), p.micro_batches().end()); },
          "Per sequence of the step, in id order, the micro-batch that computes it.")
      .def_property_readonly(
          "plans",
          [](const StepPlan& p) {
            py::list plans;
            for (const Plan& plan : p.plans()) {
              plans.append(py::cast(plan, py::return_value_policy::reference_internal, py::cast(p)));
            }
            return plans;
          },
          "Per micro-batch, the Plan of its sequences. A Plan numbers these sequences alone: see sequences_of.")
      .def_property_readonly("num_micro_batches", &StepPlan::num_micro_batches,
                             "How many the step has; some may be empty.")
      .def_property_readonly(
          "sync", [](const StepPlan& p) { return step_sync_name(p.input().sync); },
          "Where ranks wait for each other: in every 'micro_batch', or once, at the end of the 'step'.")
      .def(
          "sequences_of",
          [](const StepPlan& p, const py::object& micro_batch) {
            return values_of(p.sequences_of(micro_batch_from(p, micro_batch)));
          },
          py::arg("micro_batch"),
          "The step's ids of a micro-batch's sequences. Entry n is sequence n of the micro-batch's plan.")
      .def(
          "sequences_on",
          [](const StepPlan& p, const py::object& rank, const py::object& micro_batch) {
            return values_of(p.sequences_on(rank_from(p, rank), micro_batch_from(p, micro_batch)));
          },
          py::arg("rank"), py::arg("micro_batch"),
          "The step's ids of the sequences of which a rank holds a chunk in a micro-batch, in the order of its rows.")
      .def(
          "chunks_on",
          [](const StepPlan& p, const py::object& rank, const py::object& micro_batch) {
            const Rank on = rank_from(p, rank);
            const int32_t number = micro_batch_from(p, micro_batch);
            const std::vector<int32_t> ids = values_of(p.sequences_on(on, number));
            const Plan& plan = p.plans()[number];
            const std::span<const int32_t> rows = plan.chunks_on(on);
            std::vector<std::tuple<int32_t, int64_t, int64_t>> chunks;
            for (size_t i = 0; i < ids.size(); ++i) {
              const Chunk& chunk = plan.chunk(rows[i]);
              chunks.emplace_back(ids[i], chunk.first_token, chunk.first_token + chunk.num_tokens);
            }
            return chunks;
          },
          py::arg("rank"), py::arg("micro_batch"),
          "As sequences_on, with the tokens that the rank holds: (the step's id, begin, end) of each chunk.")
      .def(
          "home_sequences",
          [](const StepPlan& p, const py::object& rank, const py::object& micro_batch) {
            return p.home_sequences(rank_from(p, rank), micro_batch_from(p, micro_batch));
          },
          py::arg("rank"), py::arg("micro_batch"),
          "The indices, in a rank's own list, of the sequences that a micro-batch computes; ascending.")
      .def("fill_ranks", &fill_ranks,
           "The plan, changed so that every rank has a sequence in every micro-batch, as far as there are sequences "
           "for it: short ones move, and shared ones where a rank takes no whole ones.")
      .def_property_readonly("num_tokens", &StepPlan::num_tokens, "How many tokens all sequences have.")
      .def_property_readonly("max_tokens", &StepPlan::max_tokens, "Tokens of the fullest rank of any micro-batch.")
      .def_property_readonly("tokens_moved", &StepPlan::tokens_moved,
                             "Tokens held by another rank than their home, over all micro-batches.")
      .def_property_readonly("attention_tokens_moved", &StepPlan::attention_tokens_moved,
                             "Tokens that leave their rank in each all-to-all of an attention, over all micro-batches.")
      .def_property_readonly("exchanged_fraction", &StepPlan::exchanged_fraction,
                             "attention_tokens_moved over num_tokens.")
      .def_property_readonly(
          "predicted_time", [](const StepPlan& p) { return predict_accumulated(p).total_s; },
          "Predicted seconds of the step.")
      .def_property_readonly(
          "predicted_times", [](const StepPlan& p) { return predict_accumulated(p).micro_batch_s; },
          "Per micro-batch, predicted seconds. They add up to predicted_time where ranks wait in every micro-batch.")
      .def_property_readonly(
          "lower_bound", [](const StepPlan& p) { return lower_bound_s(p.input()); },
          "No plan of these sequences, this topology and this number of micro-batches takes fewer seconds.")
      .def_property_readonly(
          "gap", [](const StepPlan& p) { return prediction_of(p).gap(); },
          "predicted_time / lower_bound - 1: how far from the best this plan may be.")
      .def_property_readonly(
          "ideal_time", [](const StepPlan& p) { return predict_accumulated(p).ideal_s; },
          "Seconds of the step with the work spread evenly and no exchange, plus the fixed time of each micro-batch.")
      .def("validate", &StepPlan::validate,
           "Checks every promise of the plan; raises StateError with the first one broken.")
      .def("to_json", &to_json, "The plan as text, to be read by from_json.")
      .def_static(
          "from_json", [](const py::object& json) { return step_plan_from_json(text_from(json, "json")); },
          py::arg("json"),
          "The plan that to_json wrote. Raises ArgumentError where the text holds no plan, or no valid one.")
      .def(py::self == py::self)
      .def(py::pickle([](const StepPlan& p) { return py::str(to_json(p)); },
                      [](const py::str& s) { return step_plan_from_json(s.cast<std::string>()); }))
      .def("__repr__", &describe_step);
}
