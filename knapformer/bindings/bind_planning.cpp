#include "knapformer/bindings/from_python.h"
#include "knapformer/bindings/torch_bindings.h"

namespace py = pybind11;
using namespace knapformer;  // NOLINT: this file is nothing but names of the library

namespace {

/// The arguments that plan_routing and start_planning share.
std::tuple<std::vector<int64_t>, int64_t, std::vector<Mask>, std::vector<double>> step_from(
    const GivenLengths& seq_lens, const GivenInteger& d_model, const GivenMasks& masks, const GivenWork& work) {
  return {lengths_from(seq_lens), integer_from(d_model, "d_model"), masks_from(masks), work_from(work)};
}

StepShape shape_from(const GivenInteger& micro_batches, const GivenText& sync) {
  const int64_t count = integer_from(micro_batches, "micro_batches");
  if (count < 1 || count > StepInput::kMaxMicroBatches) {
    throw_argument("micro_batches", count, text("1 to ", StepInput::kMaxMicroBatches));
  }
  return {.num_micro_batches = static_cast<int32_t>(count), .sync = parse_step_sync(text_from(sync, "sync"))};
}

StepMetrics prefixed_metrics(SequenceBalancer& self) {
  StepMetrics metrics;
  for (const auto& [name, value] : self.metrics()) metrics["balancer/" + name] = value;
  return metrics;
}

}  // namespace

void bind_planning_ahead(py::module_& m) {
  // Its destructor waits for a thread, so it runs without the GIL, which other threads of this process need.
  py::class_<SequenceBalancer::PlanningAhead, std::shared_ptr<SequenceBalancer::PlanningAhead>>(
      m, "PlanningAhead", "What start_planning returns.", py::release_gil_before_calling_cpp_dtor())
      .def_property_readonly("ready", &SequenceBalancer::PlanningAhead::ready,
                             "Whether finish_planning would find the thread done.")
      .def_property_readonly("num_ended", &SequenceBalancer::PlanningAhead::num_ended,
                             "How many ranks' data had ended. StateError before start_moving or finish_planning.");
  py::class_<Samples, std::shared_ptr<Samples>>(m, "Samples", "What one rank loaded, to move with start_moving.")
      .def(py::init([](const std::vector<std::pair<std::string, bool>>& fields, std::vector<SampleTensors> samples,
                       const GivenLengths& seq_lens) {
             std::vector<SampleField> named;
             for (const auto& [name, per_token] : fields) named.push_back({.name = name, .per_token = per_token});
             return std::make_shared<Samples>(std::move(named), std::move(samples), lengths_from(seq_lens));
           }),
           py::arg("fields"), py::arg("samples"), py::arg("seq_lens"),
           R"(fields: the name of each field, and whether it has a row for each token. samples: the tensors of each
sample, in the order of the fields: dense, on the CPU, without gradients. seq_lens: tokens of each sample. Raises
ArgumentError.)")
      .def_property_readonly("seq_lens", &Samples::seq_lens, "Tokens of each sample.");
}

void bind_planning(BalancerClass& balancer) {
  balancer
      .def(
          "plan_routing",
          [](SequenceBalancer& self, const GivenLengths& seq_lens, const GivenInteger& d_model, const GivenMasks& masks,
             const GivenWork& work) {
            return convert_then_call(
                self, [&] { return step_from(seq_lens, d_model, masks, work); },
                [&](const auto&... step) { return self.plan_routing(step...); });
          },
          py::arg("seq_lens"), py::arg("d_model"), py::arg("masks") = py::none(), py::kw_only(),
          py::arg("work") = py::none(),
          R"(Learns the lengths of all ranks' sequences, and plans where their tokens go until the next plan_routing.

seq_lens: tokens of each of this rank's sequences, at least 1 each; a list or an integer tensor (a tensor on an
accelerator costs a wait for the accelerator). May be empty. d_model: width of the blocks, in features; the same on all
ranks. masks: one for each of these sequences, as in knapformer.attention_pairs; None: the balancer's own mask. work:
the work of each of these sequences, as in knapformer.plan, in place of what the formula gives for its length; from
every rank that has sequences, or from none. With given work, observe learns only the speeds of ranks. Returns the Plan,
the same on all ranks. Lengths that cannot keep max_tokens_per_rank raise ArgumentError on all ranks; then no plan is in
force until the next one is made.

Collective over the balancer's group, one collective; on CPU tensors where the group has a CPU backend.)")
      .def(
          "start_planning",
          [](SequenceBalancer& self, const GivenLengths& seq_lens, const GivenInteger& d_model, bool ended,
             std::optional<std::string> failure, const GivenMasks& masks, const GivenWork& work) {
            return convert_then_call(
                self, [&] { return step_from(seq_lens, d_model, masks, work); },
                [&](const std::vector<int64_t>& lens, int64_t width, const std::vector<Mask>& of_each,
                    const std::vector<double>& given) {
                  return self.start_planning(
                      lens, width, {.masks = of_each, .work = given, .ended = ended, .failure = std::move(failure)});
                });
          },
          py::arg("seq_lens"), py::arg("d_model"), py::kw_only(), py::arg("ended") = false,
          py::arg("failure") = py::none(), py::arg("masks") = py::none(), py::arg("work") = py::none(),
          R"(The first half of plan_routing, for a step to come: launches the gather of lengths and returns. The rest of
planning runs on a separate thread. Hand the returned object to finish_planning, on all ranks or none.

ended: this rank's data has ended (PlanningAhead.num_ended). failure: why this rank's data has failed; then
finish_planning raises StateError on all ranks.

Collective over the balancer's group, one collective.)")
      .def(
          "plan_step",
          [](SequenceBalancer& self, const GivenLengths& seq_lens, const GivenInteger& d_model,
             const GivenInteger& micro_batches, const GivenText& sync, const GivenMasks& masks, const GivenWork& work) {
            return convert_then_call(
                self,
                [&] {
                  return std::tuple_cat(step_from(seq_lens, d_model, masks, work),
                                        std::tuple(shape_from(micro_batches, sync)));
                },
                [&](const std::vector<int64_t>& lens, int64_t width, const std::vector<Mask>& of_each,
                    const std::vector<double>& given,
                    const StepShape& shape) { return self.plan_step(lens, width, shape, of_each, given); });
          },
          py::arg("seq_lens"), py::arg("d_model"), py::kw_only(), py::arg("micro_batches"),
          py::arg("sync") = "micro_batch", py::arg("masks") = py::none(), py::arg("work") = py::none(),
          R"(Learns the lengths of all ranks' sequences of an optimizer step, and plans its micro-batches together.

seq_lens: tokens of all this rank's sequences of the step. micro_batches, sync: as in knapformer.plan, the same on all
ranks. Returns the StepPlan, the same on all ranks. Of this rank's sequences, micro-batch k computes
plan.home_sequences(rank, k): pack these, call follow_micro_batch(k), and go on as after plan_routing. The other
arguments are as in plan_routing.

Collective over the balancer's group, one collective a step.)")
      .def(
          "follow_micro_batch",
          [](SequenceBalancer& self, const GivenInteger& micro_batch) {
            return convert_then_call(
                self, [&] { return std::tuple(integer_from(micro_batch, "micro_batch")); },
                [&](int64_t number) { return self.follow_micro_batch(number); });
          },
          py::arg("micro_batch"),
          R"(Makes a micro-batch's plan of the last plan_step the plan in force, for the calls after this one. Returns
it.

All ranks call it with the same number. Micro-batches may come in any order, and several times. StateError before
plan_step. No collective.)")
      .def(
          "follow",
          [](SequenceBalancer& self, const Plan& plan) {
            const py::gil_scoped_release release;
            self.follow(plan);
          },
          py::arg("plan"),
          R"(Makes a given plan the plan in force, for the calls after this one. Every rank made it by itself, from
lengths that are known before the data is loaded (BalancedBatchSampler.plan). No lengths are gathered.

plan: of the balancer's topology and number of ranks, the same on all ranks; made with any settings. route takes tokens
from the plan's home ranks to their chunks. Where ranks load their own chunks, in the order of chunk_lens, nothing is
routed, and attention works on these tokens at once.

Collective over the balancer's group: one all-gather of a number, for which the next exchange waits. Ranks whose plans
differ raise ArgumentError there, before a token moves.)")
      .def(
          "start_planning_step",
          [](SequenceBalancer& self, const std::shared_ptr<Samples>& samples, const GivenInteger& d_model,
             const GivenInteger& micro_batches, const GivenText& sync, const GivenInteger& max_bytes_in_flight,
             bool ended, std::optional<std::string> failure, const GivenMasks& masks, const GivenWork& work) {
            return convert_then_call(
                self,
                [&] {
                  return std::tuple(integer_from(d_model, "d_model"), shape_from(micro_batches, sync),
                                    integer_from(max_bytes_in_flight, "max_bytes_in_flight"), masks_from(masks),
                                    work_from(work));
                },
                [&](int64_t width, const StepShape& shape, int64_t max_bytes, const std::vector<Mask>& of_each,
                    const std::vector<double>& given) {
                  return self.start_planning(samples->seq_lens(), width,
                                             {.masks = of_each,
                                              .work = given,
                                              .ended = ended,
                                              .failure = std::move(failure),
                                              .step = shape,
                                              .samples = samples,
                                              .max_bytes_in_flight = max_bytes});
                });
          },
          py::arg("samples"), py::arg("d_model"), py::kw_only(), py::arg("micro_batches"),
          py::arg("sync") = "micro_batch", py::arg("max_bytes_in_flight") = 0, py::arg("ended") = false,
          py::arg("failure") = py::none(), py::arg("masks") = py::none(), py::arg("work") = py::none(),
          R"(As start_planning, for an optimizer step whose samples move to the ranks that compute them. Hand the
returned object to start_moving, finish_planning_step and finish_moving, in this order, on all ranks or none. Calls of
other steps may come between them.

Collective over the balancer's group, one collective.)")
      .def(
          "start_moving",
          [](SequenceBalancer& self, const std::shared_ptr<SequenceBalancer::PlanningAhead>& ahead) {
            const py::gil_scoped_release release;
            self.start_moving(*ahead);
          },
          py::arg("ahead"),
          R"(Waits for the rest of planning, and launches the all-to-all of samples. Collective. For failed data and
refused lengths, finish_planning_step raises the error.)")
      .def(
          "finish_planning_step",
          [](SequenceBalancer& self, const std::shared_ptr<SequenceBalancer::PlanningAhead>& ahead) {
            return convert_then_call(
                self, [] { return std::tuple(); }, [&] { return self.finish_planning_step(*ahead); });
          },
          py::arg("ahead"), "As finish_planning, for a step: follow_micro_batch takes its micro-batches from now on.")
      .def(
          "is_in_force",
          [](const SequenceBalancer& self, const std::shared_ptr<SequenceBalancer::PlanningAhead>& ahead) {
            return self.is_in_force(*ahead);
          },
          py::arg("ahead"),
          "Whether the step in force is this one: no other was planned, or finished, since it was. Not collective.")
      .def(
          "finish_moving",
          [](SequenceBalancer& self, const std::shared_ptr<SequenceBalancer::PlanningAhead>& ahead) {
            const py::gil_scoped_release release;
            return self.finish_moving(*ahead);
          },
          py::arg("ahead"),
          R"(Waits for the samples. Returns, by micro-batch, the tensors of each chunk on this rank, in the order of its
rows. ArgumentError on all ranks where a single chunk has more than max_bytes_in_flight. Collective.)")
      .def(
          "finish_planning",
          [](SequenceBalancer& self, const std::shared_ptr<SequenceBalancer::PlanningAhead>& ahead) {
            return convert_then_call(self, [] { return std::tuple(); }, [&] { return self.finish_planning(*ahead); });
          },
          py::arg("ahead"),
          R"(The second half of plan_routing: waits for the rest of planning, and makes its plan the plan in force, for
the calls after this one. Returns it. A plan may be taken up again, after others. ArgumentError for an object that
another balancer or start_planning_step returned.

All ranks call it, with what they started together. No collective, except where some rank has more sequences than any
rank had before.)")
      .def_property_readonly(
          "topology", [](const SequenceBalancer& self) { return self.topology().str(); },
          "The topology's text. StateError where it is 'auto' and no lengths have been planned.")
      .def_property_readonly(
          "plan", [](const SequenceBalancer& self) { return self.plan(); },
          "The plan in force. StateError where there is none.")
      .def_property_readonly("seq_lens", &SequenceBalancer::seq_lens,
                             "int32 on the CPU: tokens of this rank's sequences in the plan in force.")
      .def_property_readonly(
          "chunk_lens", &SequenceBalancer::chunk_lens,
          "int32 on the CPU: tokens of the chunks that this rank holds in the plan in force, in row order.")
      .def(
          "observe",
          [](SequenceBalancer& self, const GivenNumber& seconds) { self.observe(number_from(seconds, "seconds")); },
          py::arg("seconds"),
          R"(Feeds back how long this rank was busy with the step of the last plan: its forward and backward passes,
without waiting for other ranks. Of a step of micro-batches (plan_step, BalancedLoader): with those that were followed
since the last call, so call it after each, or once after all of them. The seconds reach all ranks with the lengths of
the next plan, and all learn the same gamma and speeds from them, which later plans follow. Warns once where the given
workload model misses the observed times by more than 10 %, and once where seconds are 100 times off those of the other
ranks and steps (milliseconds, say): such times are left out. A rank may skip steps. Raises ArgumentError where seconds
are not from 1e-12 to 1e12, StateError before plan_routing. Not collective.)")
      .def("metrics", &prefixed_metrics,
           R"(Metrics for a training loop to log, of the step since the last plan, so far: a flat dict.

Keys are 'balancer/...', values numbers:
wir, max_over_mean (_before, _after): of the planned work per rank; tokens_before, tokens_after: of this rank;
tokens_moved: by one route, all ranks; attention_tokens_moved: by each exchange of an attention, all ranks;
bytes_sent, num_collectives: of this rank; planning_s: the plan and its tables; waiting_s: how long the host waited for
other ranks in the balancer's collectives (with tensors on an accelerator the stream waits instead, which does not
count; the host of a rank without tokens waits there too); gamma, rank_speed: what the plan was made with;
given_model_error, learned_model_error: of the workload model against what was observed. Not collective.)");
}
