#include "knapformer/bindings/from_python.h"
#include "knapformer/bindings/torch_bindings.h"

namespace py = pybind11;
using namespace knapformer;  // NOLINT: this file is nothing but names of the library

namespace {

/// Whether a kernel says that it takes parts of queries.
bool cuts_queries(py::handle attend) {
  const bool has_attributes =
      PyFunction_Check(attend.ptr()) == 0 ||
      reinterpret_cast<PyFunctionObject*>(attend.ptr())->func_dict != nullptr;  // a miss is slow
  return has_attributes && py::bool_(py::getattr(attend, "cuts_queries", py::bool_(false)));
}

/// Whether a kernel goes by the planned masks (knapformer/masked.py).
bool takes_masks(py::handle attend) {
  return PyFunction_Check(attend.ptr()) == 0 && py::bool_(py::getattr(attend, "takes_masks", py::bool_(false)));
}

/// Chooses the kernel of attention without `attend`, by the text of the mask of all sequences, None where they have
/// several. Python sets it (knapformer/balancer.py).
py::object& kernel_for() {
  static auto* const hook = new py::object(py::none());  // never destroyed: the interpreter may have ended before
  return *hook;
}

py::object own_kernel(const Step& self) {
  const std::optional<Mask>& mask = self.common_mask();
  return kernel_for()(mask ? py::cast(mask->str()) : py::none());
}

/// Calls `attend` under the GIL, whether or not the caller holds it.
Attend attend_from(const Step& self, const py::object& attend) {
  if (PyCallable_Check(attend.ptr()) == 0) throw_argument("attend", type_of(attend), "a function");
  const auto called = [&self](const py::object& kernel, const auto&... arguments) {
    const py::gil_scoped_acquire acquire;
    try {
      const py::object result = kernel(arguments...);
      if (!py::isinstance<py::tuple>(result)) return tensor_from(result, "attend's result");
      const auto pair = result.cast<py::tuple>();
      if (pair.size() != 2) throw_argument("attend's result", text(pair.size(), " values"), "o, or (o, log_sum_exp)");
      static_cast<void>(tensor_from(pair[1], "attend's log_sum_exp"));
      return tensor_from(pair[0], "attend's result");
    } catch (const py::error_already_set& error) {
      self.report(StateError(text("attention: ", std::string(py::str(error.type().attr("__name__"))), ": ",
                                  std::string(py::str(error.value())))));
      throw;
    }
  };
  if (takes_masks(attend)) {
    Attend made = [called, &attend](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                    const SequenceRows& rows) { return called(attend, q, k, v, rows.masks); };
    made.takes_masks = true;
    return made;
  }
  if (cuts_queries(attend)) {
    Attend made = [called, &attend](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                    const SequenceRows& rows) {
      return called(attend, q, k, v, rows.query_lens, rows.key_lens, rows.query_starts);
    };
    if (py::hasattr(attend, "in_stages")) {
      made.in_stages = [called, &attend](const at::Tensor& q, const at::Tensor& query_lens, const NextStage& next) {
        const py::gil_scoped_acquire acquire;
        if (!py::bool_(attend.attr("merges")(q))) return at::Tensor();
        const py::cpp_function next_stage([&next]() -> py::object {
          const auto stage = [&] {
            const py::gil_scoped_release release;
            return next();
          }();
          return stage ? py::object(py::make_tuple(stage->k, stage->v, stage->key_lens)) : py::none();
        });
        return called(attend.attr("in_stages"), q, query_lens, next_stage);
      };
    }
    return made;
  }
  return [called, &attend](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& seq_lens) {
    return called(attend, q, k, v, seq_lens);
  };
}

KernelMask mask_from(const py::object& mask) {
  const std::string name = text_from(mask, "mask");
  return name == "planned" ? std::nullopt : std::optional(Mask::parse(name));
}

/// None: the kernel's own attribute `mask`, as PackedAttention has it, or "full".
KernelMask mask_from(const py::object& mask, const py::object& attend) {
  std::optional<std::string> own;
  if (PyFunction_Check(attend.ptr()) == 0) own = as_text(py::getattr(attend, "mask", py::none()));  // a miss is slow
  if (mask.is_none() && !own && takes_masks(attend)) return std::nullopt;
  if (mask.is_none()) return Mask::parse(own.value_or("full"));
  if (own && own != as_text(mask)) throw_argument("mask", shown(mask), text("'", *own, "', as attend.mask says"));
  return mask_from(mask);
}

}  // namespace

void bind_step(py::module_& m) {
  m.def("set_kernel_for", [](py::object choose) { kernel_for() = std::move(choose); }, py::arg("choose"));
  py::class_<Step>(m, "Step", R"(A plan on this rank, with the tables and groups by which its tensors move.

What balancer.step returns, and balancer.current. Its methods are those of SequenceBalancer, which go by the step in
force; a step that is held goes by itself, whatever is planned after it.)")
      .def_property_readonly("plan", &Step::step_plan, "The Plan of this micro-batch.")
      .def_property_readonly("number", &Step::number, R"(By which messages name the step: ranks count, as they plan.

A plan has one, an optimizer step's plan one for each micro-batch; no other step of the balancer has the same.)")
      .def_property_readonly("seq_lens", &Step::seq_lens, "int32 on the CPU: tokens of this rank's sequences.")
      .def_property_readonly("chunk_lens", &Step::chunk_lens,
                             "int32 on the CPU: tokens of the chunks that this rank holds, in row order.")
      .def(
          "route",
          [](const Step& self, const py::object& x, const py::object& features,
             const py::object& sequence_features) -> py::tuple {
            Step::Routed routed = convert_then_call(
                self,
                [&] {
                  return std::tuple(tensor_from(x, "x"), tensors_from(features, "features"),
                                    tensors_from(sequence_features, "sequence_features"));
                },
                &Step::route);
            if (sequence_features.is_none()) return py::make_tuple(routed.chunk_lens, routed.x, routed.features);
            return py::make_tuple(routed.chunk_lens, routed.x, routed.features, routed.sequence_features);
          },
          py::arg("x"), py::arg("features") = py::none(), py::arg("sequence_features") = py::none())
      .def(
          "reverse_route",
          [](const Step& self, const py::object& x) {
            Step::Returned returned =
                convert_then_call(self, [&] { return std::tuple(tensor_from(x, "x")); }, &Step::reverse_route);
            return std::make_tuple(returned.seq_lens, returned.x);
          },
          py::arg("x"))
      .def(
          "pre_attn",
          [](const Step& self, const py::object& q, const py::object& k, const py::object& v, const py::object& mask) {
            Step::AttentionInputs inputs = convert_then_call(
                self,
                [&] {
                  return std::tuple(tensor_from(q, "q"), tensor_from(k, "k"), tensor_from(v, "v"), mask_from(mask));
                },
                &Step::pre_attn);
            return std::make_tuple(inputs.seq_lens, inputs.q, inputs.k, inputs.v);
          },
          py::arg("q"), py::arg("k"), py::arg("v"), py::arg("mask") = "full")
      .def(
          "post_attn",
          [](const Step& self, const py::object& o) {
            Step::AttentionOutput output =
                convert_then_call(self, [&] { return std::tuple(tensor_from(o, "o")); }, &Step::post_attn);
            return std::make_tuple(output.chunk_lens, output.o);
          },
          py::arg("o"))
      .def(
          "attention",
          [](const Step& self, const py::object& q, const py::object& k, const py::object& v, py::object attend,
             const py::object& mask) {
            return convert_then_call(
                self,
                [&] {
                  if (attend.is_none()) attend = own_kernel(self);
                  return std::tuple(tensor_from(q, "q"), tensor_from(k, "k"), tensor_from(v, "v"),
                                    attend_from(self, attend), mask_from(mask, attend));
                },
                &Step::attention);
          },
          py::arg("q"), py::arg("k"), py::arg("v"), py::arg("attend") = py::none(), py::arg("mask") = py::none());
}
