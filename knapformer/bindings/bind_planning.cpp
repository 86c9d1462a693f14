#include "knapformer/bindings/from_python.h"

namespace py = pybind11;
using namespace knapformer;  // NOLINT: this file is nothing but names of the library

namespace {

int32_t micro_batches_from(const py::object& count) {
  return integer_from<int32_t>(count, "micro_batches", 1, StepInput::kMaxMicroBatches);
}

PlanningAhead& ahead_from(const py::object& ahead) {
  return instance_from<PlanningAhead>(ahead, "ahead", "what start_planning returned");
}

const Plan& plan_from(const py::object& plan) { return instance_from<Plan>(plan, "plan", "a Plan"); }

}  // namespace

void bind_planning_ahead(py::module_& m) {
  // Where it is the last to hold the planning thread its destructor waits for that, so it runs without the GIL, which
  // other threads of this process need. A balancer's does so, too.
  py::class_<PlanningAhead, std::shared_ptr<PlanningAhead>>(m, "PlanningAhead", "What start_planning returns.",
                                                            py::release_gil_before_calling_cpp_dtor())
      .def_property_readonly("ready", &PlanningAhead::ready, "Whether finish_planning would find the thread done.")
      .def_property_readonly("num_ended", &PlanningAhead::num_ended,
                             "How many ranks' data had ended. StateError before start_moving or finish_planning.");
  py::class_<Samples, std::shared_ptr<Samples>>(m, "Samples", "What one rank loaded, to move with start_moving.")
      .def(py::init([](const std::vector<std::pair<std::string, bool>>& fields, std::vector<SampleTensors> samples,
                       const py::object& seq_lens) {
             std::vector<SampleField> named;
             for (const auto& [name, per_token] : fields) named.push_back({.name = name, .per_token = per_token});
             return std::make_shared<Samples>(std::move(named), std::move(samples), lengths_from(seq_lens));
           }),
           py::arg("fields"), py::arg("samples"), py::arg("seq_lens"), "As in sample_exchange.h.")
      .def_property_readonly("seq_lens", &Samples::seq_lens, "Tokens of each sample.");
}

void bind_planning(BalancerClass& balancer) {
  const auto property = properties_of(balancer);
  property("current", "The step in force: that of the last plan. StateError where there is none.",
           [](const SequenceBalancer& self) { return self.current(); });
  property("topology", "The topology's text.", [](const SequenceBalancer& self) { return self.topology().str(); });
  property("plan", "The plan of the micro-batch in force. StateError where there is none.",
           [](const SequenceBalancer& self) { return self.current().step_plan(); });
  property("seq_lens", "int32 on the CPU: tokens of this rank's sequences in the plan in force.",
           [](const SequenceBalancer& self) { return self.current().seq_lens(); });
  property("chunk_lens",
           "int32 on the CPU: tokens of the chunks that this rank holds in the plan in force, in row order.",
           [](const SequenceBalancer& self) { return self.current().chunk_lens(); });
  balancer
      .def("plan_routing",
           converting<SequenceBalancer>(
               [](SequenceBalancer& self, const std::vector<int64_t>& seq_lens, int64_t d_model,
                  std::vector<Mask>& masks, int32_t micro_batches, std::vector<double>& work) {
                 return self.plan_routing(
                     seq_lens, d_model,
                     {.masks = std::move(masks), .work = std::move(work), .num_micro_batches = micro_batches});
               },
               lengths_from, width_from, masks_from, micro_batches_from, work_from))
      .def("start_planning",
           [](SequenceBalancer& self, const py::object& seq_lens, const py::object& d_model,
              const py::object& micro_batches, const py::object& ended, const py::object& failure,
              const py::object& masks, const py::object& work, const py::object& samples) {
             return convert_then_call(
                 self,
                 [&] {
                   StepData data{.masks = masks_from(masks),
                                 .work = work_from(work),
                                 .num_micro_batches = micro_batches_from(micro_batches),
                                 .ended = flag_from(ended, "ended")};
                   if (!failure.is_none()) data.failure = text_from(failure, "failure");
                   if (!samples.is_none()) {
                     instance_from<Samples>(samples, "samples", "Samples, or None");
                     data.samples = samples.cast<std::shared_ptr<Samples>>();
                   }
                   std::vector<int64_t> lens = data.samples ? data.samples->seq_lens() : lengths_from(seq_lens);
                   return std::tuple(std::move(lens), width_from(d_model), std::move(data));
                 },
                 &SequenceBalancer::start_planning);
           })
      .def("finish_planning", converting<SequenceBalancer>(&SequenceBalancer::finish_planning, ahead_from))
      .def("start_moving", converting<SequenceBalancer>(&SequenceBalancer::start_moving, ahead_from))
      .def("finish_moving", converting<SequenceBalancer>(&SequenceBalancer::finish_moving, ahead_from))
      .def("step", converting<SequenceBalancer>(
                       &SequenceBalancer::step, plan_from,
                       [](const py::object& index) { return integer_from<int32_t>(index, "micro_batch"); }))
      .def("use",
           [](SequenceBalancer& self, const Step& step) {
             self.follow(step);
             return step.step_plan();
           })
      .def("current_for",
           [](SequenceBalancer& self, const std::string& call) {
             const py::gil_scoped_release release;  // what is in force may be told to the store
             return self.current_for(call);
           })
      .def("watched", &SequenceBalancer::watched)
      .def("observe",
           [](SequenceBalancer& self, const py::object& seconds) { self.observe(number_from(seconds, "seconds")); })
      .def("metrics", &SequenceBalancer::metrics);
}
