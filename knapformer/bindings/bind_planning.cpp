#include "knapformer/bindings/from_python.h"
#include "knapformer/bindings/torch_bindings.h"

namespace py = pybind11;
using namespace knapformer;  // NOLINT: this file is nothing but names of the library

namespace {

/// The arguments that plan_routing and start_planning share.
auto step_from(const py::object& seq_lens, const py::object& d_model, const py::object& masks, const py::object& work) {
  return std::tuple{lengths_from(seq_lens), integer_from(d_model, "d_model"), masks_from(masks), work_from(work)};
}

StepShape shape_from(const py::object& micro_batches, const py::object& sync) {
  constexpr int32_t kMax = StepInput::kMaxMicroBatches;
  return {.num_micro_batches = integer_from<int32_t>(micro_batches, "micro_batches", 1, kMax),
          .sync = parse_step_sync(text_from(sync, "sync"))};
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
                       const py::object& seq_lens) {
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
      .def("plan_routing",
           [](SequenceBalancer& self, const py::object& seq_lens, const py::object& d_model, const py::object& masks,
              const py::object& work) {
             return convert_then_call(
                 self, [&] { return step_from(seq_lens, d_model, masks, work); },
                 [&](const auto&... step) { return self.plan_routing(step...); });
           })
      .def("start_planning",
           [](SequenceBalancer& self, const py::object& seq_lens, const py::object& d_model, bool ended,
              std::optional<std::string> failure, const py::object& masks, const py::object& work) {
             return convert_then_call(
                 self, [&] { return step_from(seq_lens, d_model, masks, work); },
                 [&](const std::vector<int64_t>& lens, int64_t width, const std::vector<Mask>& of_each,
                     const std::vector<double>& given) {
                   return self.start_planning(
                       lens, width, {.masks = of_each, .work = given, .ended = ended, .failure = std::move(failure)});
                 });
           })
      .def(
          "plan_step",
          [](SequenceBalancer& self, const py::object& seq_lens, const py::object& d_model,
             const py::object& micro_batches, const py::object& sync, const py::object& masks, const py::object& work) {
            return convert_then_call(
                self,
                [&] {
                  return std::tuple_cat(step_from(seq_lens, d_model, masks, work),
                                        std::tuple(shape_from(micro_batches, sync)));
                },
                [&](const std::vector<int64_t>& lens, int64_t width, const std::vector<Mask>& of_each,
                    const std::vector<double>& given,
                    const StepShape& shape) { return self.plan_step(lens, width, shape, of_each, given); });
          })
      .def("follow_micro_batch",
           [](SequenceBalancer& self, const py::object& micro_batch) {
             return convert_then_call(
                 self, [&] { return std::tuple(integer_from(micro_batch, "micro_batch")); },
                 [&](int64_t number) { return self.follow_micro_batch(number); });
           })
      .def("follow",
           [](SequenceBalancer& self, const py::object& plan) {
             convert_then_call(
                 self, [&] { return std::tuple<const Plan&>(instance_from<Plan>(plan, "plan", "a Plan")); },
                 [&](const Plan& given) { self.follow(given); });
           })
      .def(
          "start_planning_step",
          [](SequenceBalancer& self, const std::shared_ptr<Samples>& samples, const py::object& d_model,
             const py::object& micro_batches, const py::object& sync, const py::object& max_bytes_in_flight, bool ended,
             std::optional<std::string> failure, const py::object& masks, const py::object& work) {
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
      .def("finish_planning",
           [](SequenceBalancer& self, const py::object& ahead) {
             using Ahead = SequenceBalancer::PlanningAhead;
             return convert_then_call(
                 self,
                 [&] {
                   return std::tuple<Ahead&>(instance_from<Ahead>(ahead, "ahead", "what start_planning returned"));
                 },
                 [&](Ahead& started) { return self.finish_planning(started); });
           })
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
      .def("observe",
           [](SequenceBalancer& self, const py::object& seconds) { self.observe(number_from(seconds, "seconds")); })
      .def("metrics", &SequenceBalancer::metrics);
}
