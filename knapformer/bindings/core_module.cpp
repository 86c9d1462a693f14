// knapformer._core: the planner for Python, without torch.
#include <pybind11/pybind11.h>

#ifdef KNAPFORMER_WITH_TORCH
#include <torch/headeronly/version.h>
#endif

#include "knapformer/bindings/arguments.h"
#include "knapformer/core/util/error.h"
#include "knapformer/core/util/interrupt.h"

namespace py = pybind11;
using namespace knapformer;  // NOLINT: this file is nothing but names of the core

// Conversion only, in the order in which they need each other.
void bind_model(py::module_& m);    // masks; bags of ranks; seeded lengths
void bind_cost(py::module_& m);     // clusters, models, FLOPs; the predicted step time
void bind_plan(py::module_& m);     // Plan
void bind_planner(py::module_& m);  // the planners, and topologies

namespace {

void bind_errors(py::module_& m) {
  static const py::exception<ArgumentError> argument_error(m, "ArgumentError", PyExc_ValueError);
  static const py::exception<StateError> state_error(m, "StateError", PyExc_RuntimeError);
  argument_error.attr("__doc__") = "An argument is wrong: the message names it, what came and what was expected.";
  state_error.attr("__doc__") = "A call came out of order, or ranks disagree.";
  // Global: the torch module throws the same errors.
  py::register_exception_translator([](std::exception_ptr pending) {
    try {
      if (pending) std::rethrow_exception(pending);
    } catch (const ArgumentError& error) {
      py::set_error(argument_error, error.what());
    } catch (const StateError& error) {
      py::set_error(state_error, error.what());
    }
  });
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "The planner: what is decided. Needs no torch.";
  // What _torch was built against: here, for _torch itself does not load beside another torch.
#ifdef KNAPFORMER_WITH_TORCH
  m.attr("torch_version") = TORCH_VERSION;
#else
  m.attr("torch_version") = py::none();
#endif
  bind_errors(m);
  interrupt_check = check_signals;
  bind_model(m);
  bind_cost(m);
  bind_plan(m);
  bind_planner(m);
}
