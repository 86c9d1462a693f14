#include "knapformer/bindings/from_python.h"
#include "knapformer/bindings/torch_bindings.h"

namespace py = pybind11;
using namespace knapformer;  // NOLINT: this file is nothing but names of the library

namespace {

/// What plan_routing and start_planning take alike.
struct StepArguments {
  std::vector<int64_t> lens;
  int64_t d_model;
  std::vector<Mask> masks;
};

StepArguments step_from(const py::object& seq_lens, const py::object& d_model, const py::object& masks) {
  return {.lens = lengths_from(seq_lens), .d_model = integer_from(d_model, "d_model"), .masks = masks_from(masks)};
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
          [](SequenceBalancer& self, const py::object& seq_lens, const py::object& d_model, const py::object& masks) {
            return convert_then_call(
                self, [&] { return step_from(seq_lens, d_model, masks); },
                [&](const StepArguments& step) { return self.plan_routing(step.lens, step.d_model, step.masks); });
          },
          py::arg("seq_lens"), py::arg("d_model"), py::arg("masks") = py::none(),
          "Learns the lengths of all ranks' sequences, and plans where their tokens go until the next plan_routing.\n\n"
          "seq_lens: tokens of each of this rank's sequences, at least 1 each; a list or an integer tensor (one on an\n"
          "accelerator costs a wait for it). May be empty. d_model: width of the blocks, in features; the same on all "
          "ranks.\n"
          "masks: of each of these sequences, as in knapformer.attention_pairs; None: the balancer's own.\n"
          "Returns the Plan, the same on all ranks. Where these lengths cannot keep max_tokens_per_rank: ArgumentError "
          "on all\n"
          "ranks, and no plan until the next one.\n\n"
          "Collective over the balancer's group, one collective; on CPU tensors where the group has a CPU backend.")
      .def(
          "start_planning",
          [](SequenceBalancer& self, const py::object& seq_lens, const py::object& d_model, bool ended,
             std::optional<std::string> failure, const py::object& masks) {
            return convert_then_call(
                self, [&] { return step_from(seq_lens, d_model, masks); },
                [&](const StepArguments& step) {
                  return self.start_planning(step.lens, step.d_model,
                                             {.masks = step.masks, .ended = ended, .failure = std::move(failure)});
                });
          },
          py::arg("seq_lens"), py::arg("d_model"), py::kw_only(), py::arg("ended") = false,
          py::arg("failure") = py::none(), py::arg("masks") = py::none(),
          "The first half of plan_routing, for a step to come: launches the gather of lengths and returns. What is "
          "left to do\n"
          "runs on a thread of its own. Hand what it returns to finish_planning, on all ranks or none.\n\n"
          "ended: this rank's data has ended (PlanningAhead.num_ended). failure: this rank's data has failed, and "
          "why:\n"
          "finish_planning raises StateError on all ranks.\n\n"
          "Collective over the balancer's group, one collective.")
      .def(
          "finish_planning",
          [](SequenceBalancer& self, const std::shared_ptr<SequenceBalancer::PlanningAhead>& ahead) {
            const py::gil_scoped_release release;
            return self.finish_planning(*ahead);
          },
          py::arg("ahead"),
          "The second half of plan_routing: waits for what is left of planning, and makes it the plan that the calls "
          "after this\n"
          "one follow. Returns it. A plan may be taken up again, after others.\n\n"
          "All ranks call it, with what they started together. No collective, except where some rank has more "
          "sequences than\n"
          "any had before.")
      .def_property_readonly(
          "plan", [](const SequenceBalancer& self) { return self.plan(); },
          "Of the last plan_routing. StateError before it.")
      .def_property_readonly("seq_lens", &SequenceBalancer::seq_lens,
                             "int32 on the CPU: tokens of this rank's sequences in that plan.");
}
