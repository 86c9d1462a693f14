#include "knapformer/bindings/from_python.h"
#include "knapformer/bindings/torch_bindings.h"

namespace py = pybind11;
using namespace knapformer;  // NOLINT: this file is nothing but names of the library

namespace {

/// What plan_routing and start_planning take alike.
std::tuple<std::vector<int64_t>, int64_t, std::vector<Mask>> step_from(const GivenLengths& seq_lens,
                                                                       const GivenInteger& d_model,
                                                                       const GivenMasks& masks) {
  return {lengths_from(seq_lens), integer_from(d_model, "d_model"), masks_from(masks)};
}

StepMetrics prefixed_metrics(SequenceBalancer& self) {
  StepMetrics metrics;
  for (const auto& [name, value] : self.metrics()) metrics["balancer/" + name] = value;
  return metrics;
}

}  // namespace

void bind_planning_ahead(py::module_& m) {
  // Its end waits for a thread: not with the GIL, which others of this process need.
  py::class_<SequenceBalancer::PlanningAhead, std::shared_ptr<SequenceBalancer::PlanningAhead>>(
      m, "PlanningAhead", "What start_planning returns.", py::release_gil_before_calling_cpp_dtor())
      .def_property_readonly("ready", &SequenceBalancer::PlanningAhead::ready,
                             "Whether finish_planning would find the thread done.")
      .def_property_readonly("num_ended", &SequenceBalancer::PlanningAhead::num_ended,
                             "Ranks whose data had ended. StateError before finish_planning.");
}

void bind_planning(BalancerClass& balancer) {
  balancer
      .def(
          "plan_routing",
          [](SequenceBalancer& self, const GivenLengths& seq_lens, const GivenInteger& d_model,
             const GivenMasks& masks) {
            return convert_then_call(
                self, [&] { return step_from(seq_lens, d_model, masks); },
                [&](const auto&... step) { return self.plan_routing(step...); });
          },
          py::arg("seq_lens"), py::arg("d_model"), py::arg("masks") = py::none(),
          R"(Learns the lengths of all ranks' sequences, and plans where their tokens go until the next plan_routing.

seq_lens: tokens of each of this rank's sequences, at least 1 each; a list or an integer tensor (one on an accelerator
costs a wait for it). May be empty. d_model: width of the blocks, in features; the same on all ranks. masks: of each
of these sequences, as in knapformer.attention_pairs; None: the balancer's own. Returns the Plan, the same on all
ranks. Where these lengths cannot keep max_tokens_per_rank: ArgumentError on all ranks, and no plan until the next
one.

Collective over the balancer's group, one collective; on CPU tensors where the group has a CPU backend.)")
      .def(
          "start_planning",
          [](SequenceBalancer& self, const GivenLengths& seq_lens, const GivenInteger& d_model, bool ended,
             std::optional<std::string> failure, const GivenMasks& masks) {
            return convert_then_call(
                self, [&] { return step_from(seq_lens, d_model, masks); },
                [&](const std::vector<int64_t>& lens, int64_t width, const std::vector<Mask>& of_each) {
                  return self.start_planning(lens, width,
                                             {.masks = of_each, .ended = ended, .failure = std::move(failure)});
                });
          },
          py::arg("seq_lens"), py::arg("d_model"), py::kw_only(), py::arg("ended") = false,
          py::arg("failure") = py::none(), py::arg("masks") = py::none(),
          R"(The first half of plan_routing, for a step to come: launches the gather of lengths and returns. What is
left to do runs on a thread of its own. Hand what it returns to finish_planning, on all ranks or none.

ended: this rank's data has ended (PlanningAhead.num_ended). failure: this rank's data has failed, and why:
finish_planning raises StateError on all ranks.

Collective over the balancer's group, one collective.)")
      .def(
          "finish_planning",
          [](SequenceBalancer& self, const std::shared_ptr<SequenceBalancer::PlanningAhead>& ahead) {
            const py::gil_scoped_release release;
            return self.finish_planning(*ahead);
          },
          py::arg("ahead"),
          R"(The second half of plan_routing: waits for what is left of planning, and makes it the plan that the
calls after this one follow. Returns it. A plan may be taken up again, after others.

All ranks call it, with what they started together. No collective, except where some rank has more sequences than any
had before.)")
      .def_property_readonly(
          "plan", [](const SequenceBalancer& self) { return self.plan(); },
          "Of the last plan_routing. StateError before it.")
      .def_property_readonly("seq_lens", &SequenceBalancer::seq_lens,
                             "int32 on the CPU: tokens of this rank's sequences in that plan.")
      .def(
          "observe",
          [](SequenceBalancer& self, const GivenNumber& seconds) { self.observe(number_from(seconds, "seconds")); },
          py::arg("seconds"),
          R"(Feeds back how long this rank was busy with the step of the last plan: its forward and backward passes,
without waiting for other ranks. All ranks hear of it with the lengths of the next plan and learn the same gamma and
speeds from it, which later plans follow. Warns once where the workload model that was given misses what is observed
by more than 10 %. A rank may skip steps. Raises ArgumentError where seconds are not positive
and finite, StateError before plan_routing. Not collective.)")
      .def("metrics", &prefixed_metrics,
           R"(What a training loop may log of the step since the last plan, so far: a flat dict.

Keys are 'balancer/...', values numbers:
wir, max_over_mean (_before, _after): of the planned work per rank; tokens_before, tokens_after: of this rank;
tokens_moved: by one route, all ranks; attention_tokens_moved: by each exchange of an attention, all ranks;
bytes_sent, num_collectives: of this rank; planning_s: the plan and its tables; waiting_s: how long the host waited for
other ranks in the balancer's collectives (with tensors on an accelerator its stream waits instead, which is not in
it); gamma, rank_speed: what the plan was made with; given_model_error, learned_model_error: of the workload model
against what was observed. Not collective.)");
}
