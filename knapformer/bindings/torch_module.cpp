// knapformer._torch: the balancer for Python.
#include "knapformer/bindings/call_errors.h"
#include "knapformer/bindings/from_python.h"
#include "knapformer/bindings/torch_bindings.h"
#include "knapformer/core/util/error.h"
#include "knapformer/core/util/interrupt.h"

namespace py = pybind11;
using namespace knapformer;  // NOLINT: this file is nothing but names of the library

namespace {

using GivenEngine = Given<"str | None">;
using GivenGroup = Given<"torch.distributed.distributed_c10d.ProcessGroup | None">;

std::optional<ExchangeEngine> engine_from(const py::object& engine) {
  if (engine.is_none()) return std::nullopt;
  const std::optional<std::string> name = as_text(engine);
  if (name == "cpu") return ExchangeEngine::kCpu;
  if (name == "device") return ExchangeEngine::kDevice;
  throw_argument("engine", shown(engine), "'cpu' or 'device', or None");
}

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
  return BalancerClass(m, "SequenceBalancer", "What knapformer.SequenceBalancer is made of.")
      .def(
          py::init([](const GivenText& topology, const GivenNumber& gamma, const GivenText& solver,
                      const GivenEffort& effort, const GivenText& mask, const GivenCluster& cluster,
                      const GivenNumbers& rank_speed, const GivenInteger& max_tokens_per_rank,
                      const GivenInteger& num_heads, const GivenModel& model, const GivenEngine& engine,
                      const GivenGroup& group, const MakeBagGroup& make_bag_group, const MakeCpuGroup& make_cpu_group) {
            const ProcessGroupPtr joined = group_from(group);
            std::string bags;
            BalancerOptions options = convert_or_report(
                [&] {
                  bags = text_from(topology, "topology");
                  return BalancerOptions{
                      .plan = settings_from(gamma, num_heads, max_tokens_per_rank, rank_speed, cluster, model),
                      .solver = text_from(solver, "solver"),
                      .effort = effort_from(effort),
                      .mask = Mask::parse(text_from(mask, "mask")),
                      .engine = engine_from(engine)};
                },
                [&](const std::exception& error) { SequenceBalancer::refuse(joined, error); });
            const py::gil_scoped_release release;
            return std::make_unique<SequenceBalancer>(bags, std::move(options), joined, make_bag_group, make_cpu_group);
          }),
          py::arg("topology"), py::kw_only(), py::arg("gamma"), py::arg("solver"), py::arg("effort"), py::arg("mask"),
          py::arg("cluster"), py::arg("rank_speed"), py::arg("max_tokens_per_rank"), py::arg("num_heads"),
          py::arg("model"), py::arg("engine"), py::arg("group"), py::arg("make_bag_group"), py::arg("make_cpu_group"),
          R"(Collective over `group`. make_bag_group(ranks) is called once by the ranks of each bag of several ranks
(`ranks`: their numbers in `group`), and returns a group of these. make_cpu_group() is called once by all ranks where
`group` has no backend for the CPU, and returns a group of the same ranks that has one. engine: 'cpu' (CPU tensors),
'device' (ATen's operations, any device), or None for the one that suits the tensors: the packing kernel on devices
that have it.)")
      .def(
          "expect_device", [](SequenceBalancer& self, const at::Device& device) { self.expect_device(device); },
          py::arg("device"),
          R"(Announces tensors on this device: plans that are made ahead from now on (start_planning, BalancedLoader)
have their index tables packed for it, on the planning thread. Without this call a balancer learns of a device, with its
index, at the first exchange there. Not collective.)")
      .def(
          "report", [](SequenceBalancer& self, const std::string& message) { self.report(StateError(message)); },
          py::arg("message"),
          R"(Tells the other ranks that this one failed and will not come to the calls they wait in: they raise
StateError with this message. Not collective.)")
      .def_property_readonly("rank", &SequenceBalancer::rank, "This rank's number inside the balancer's group.")
      .def_property_readonly("num_ranks", &SequenceBalancer::num_ranks, "How many ranks the balancer's group has.");
}

}  // namespace

PYBIND11_MODULE(_torch, m) {
  m.doc() = "What moves tensors between ranks: knapformer's C++ on LibTorch and c10d. knapformer.balancer is its face.";
  py::module_::import("knapformer._core");   // Plan, and how errors translate
  py::module_::import("torch.distributed");  // ProcessGroup
  bind_planning_ahead(m);
  m.def(
      "refuse_balancer",
      [](const GivenGroup& group, const std::string& message) {
        SequenceBalancer::refuse(group_from(group), ArgumentError(message));
      },
      py::arg("group"), py::arg("message"),
      R"(Tells the other ranks of the group, which are making a balancer, that this one makes none: they raise
ArgumentError with this message. Not collective.)");
  BalancerClass balancer = bind_balancer(m);
  bind_planning(balancer);
  bind_exchanges(balancer);
  CommGroup::set_drop_process_group(drop_without_gil);
  set_raise_in_backward(raise_as_python);
  interrupt_check = check_signals;
  m.def("release_groups", &CommGroup::release_process_groups, py::call_guard<py::gil_scoped_release>(),
        "Releases the groups of all balancers, which can start no collective afterwards. For the end of the process.");
  m.def(
      "timeout_of", [](const ProcessGroupPtr& group) { return timeout_of(*group); }, py::arg("group"),
      "How long collectives of this group may take: a timedelta.");
  make_call_errors_readable(m);
}
