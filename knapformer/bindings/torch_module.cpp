// knapformer._torch: the balancer for Python.
#include "knapformer/bindings/from_python.h"
#include "knapformer/core/util/error.h"
#include "knapformer/core/util/interrupt.h"

namespace py = pybind11;
using namespace knapformer;  // NOLINT: this file is nothing but names of the library

namespace {

ProcessGroupPtr group_from(const py::object& group) {
  if (group.is_none()) return {};
  try {
    return group.cast<ProcessGroupPtr>();
  } catch (const py::cast_error&) {
    throw_argument("group", shown(group), "a ProcessGroup, or None");
  }
}

/// The end of a group joins its threads, which need the GIL where a collective was launched under Python's thread-local
/// state: in a backward pass, say.
void drop_without_gil(ProcessGroupPtr group) {
  if (Py_IsInitialized() == 0 || PyGILState_Check() == 0) return;
  const py::gil_scoped_release release;
  group.reset();
}

/// Raises the Python exception that the module translates the error to.
[[noreturn]] void raise_as_python(const Error& error) {
  const py::gil_scoped_acquire gil;
  const bool is_argument = dynamic_cast<const ArgumentError*>(&error) != nullptr;
  const py::object type = py::module_::import("knapformer._core").attr(is_argument ? "ArgumentError" : "StateError");
  PyErr_SetString(type.ptr(), error.what());
  throw py::error_already_set();
}

BalancerClass bind_balancer(py::module_& m) {
  return BalancerClass(m, "SequenceBalancer", "What knapformer.SequenceBalancer is made of.",
                       py::release_gil_before_calling_cpp_dtor())
      .def(py::init([](const py::object& topology, const py::object& cost, const py::object& solver,
                       const py::object& max_tokens_per_rank, const py::object& group,
                       const MakeBagGroup& make_bag_group, const MakeCpuGroup& make_cpu_group) {
        ProcessGroupPtr joined = group_from(group);
        const std::string bags = text_from(topology, "topology");
        BalancerOptions options{.plan = settings_from(cost, max_tokens_per_rank),
                                .solver = solver_from(solver),
                                .effort = effort_from(cost.attr("effort")),
                                .mask = mask_from(cost.attr("mask")),
                                .sync = parse_step_sync(text_from(cost.attr("sync"), "sync"))};
        const py::gil_scoped_release release;
        return std::make_unique<SequenceBalancer>(bags, std::move(options), std::move(joined), make_bag_group,
                                                  make_cpu_group);
      }))
      .def("report", [](SequenceBalancer& self, const std::string& message) { self.report(StateError(message)); })
      .def_property_readonly("rank", &SequenceBalancer::rank, "This rank's number inside the balancer's group.")
      .def_property_readonly("num_ranks", &SequenceBalancer::num_ranks, "How many ranks the balancer's group has.");
}

}  // namespace

PYBIND11_MODULE(_torch, m) {
  m.doc() = "What moves tensors between ranks: knapformer's C++ on LibTorch and c10d. knapformer.balancer is its face.";
  py::module_::import("knapformer._core");   // Plan, and how errors translate
  py::module_::import("torch.distributed");  // ProcessGroup
  bind_planning_ahead(m);
  bind_step(m);
  BalancerClass balancer = bind_balancer(m);
  bind_planning(balancer);
  CommGroup::set_drop_process_group(drop_without_gil);
  raise_in_backward = raise_as_python;
  interrupt_check = check_signals;
  m.def("release_groups", &CommGroup::release_process_groups, py::call_guard<py::gil_scoped_release>(),
        "Releases the groups of all balancers, which can start no collective afterwards. For the end of the process.");
  m.def(
      "timeout_of", [](const ProcessGroupPtr& group) { return timeout_of(*group); }, py::arg("group"),
      "How long collectives of this group may take: a timedelta.");
}
