#include "knapformer/bindings/from_python.h"
#include "knapformer/torch/masked_attention.h"

namespace py = pybind11;
using namespace knapformer;  // NOLINT: this file is nothing but names of the library

namespace {

/// Calls `attend` under the GIL, whether or not the caller holds it. cuts, by_masks: as Attend has them.
Attend attend_from(const Step& self, const py::object& attend, bool cuts, bool by_masks) {
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
  Attend made{.kernel =
                  [called, &attend, by_masks, cuts](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                    const SequenceRows& rows) {
                    if (by_masks) return called(attend, q, k, v, rows.masks);
                    if (!cuts) return called(attend, q, k, v, rows.query_lens);
                    return called(attend, q, k, v, rows.query_lens, rows.key_lens, rows.query_starts);
                  },
              .cuts_queries = cuts,
              .takes_masks = by_masks};
  if (cuts && !by_masks && py::hasattr(attend, "in_stages")) {
    made.in_stages = [called, &attend](const at::Tensor& q, const at::Tensor& v, const at::Tensor& query_lens,
                                       const NextStage& next) {
      const py::gil_scoped_acquire acquire;
      if (!py::bool_(attend.attr("merges")(q, v))) return at::Tensor();
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

KernelMask kernel_mask_from(const py::object& mask) {
  const std::string name = text_from(mask, "mask");
  return name == "planned" ? std::nullopt : std::optional(Mask::parse(name));
}

/// own: what the kernel says, or None. given: what the caller says, or None.
KernelMask mask_applied(const py::object& own, const py::object& given, bool by_masks) {
  const std::optional<std::string> of_kernel = as_text(own);
  if (given.is_none() && !of_kernel && by_masks) return std::nullopt;
  if (given.is_none()) return Mask::parse(of_kernel.value_or("full"));
  if (of_kernel && of_kernel != as_text(given))
    throw_argument("mask", shown(given), text("'", *of_kernel, "', as attend.mask says"));
  return kernel_mask_from(given);
}

/// parts: of each sequence the first query, queries, the first key, keys; none: all of all.
MaskTables tables_of(const py::object& masks, const py::object& seq_lens,
                     const std::optional<std::vector<std::array<int64_t, 4>>>& parts) {
  const std::vector<int64_t> lens = lengths_from(seq_lens);
  const std::vector<Mask> of_sequences = masks_from(masks);
  if (of_sequences.size() != lens.size() || (parts && parts->size() != lens.size()))
    throw_argument("masks", text(of_sequences.size(), " masks"),
                   text("one for each of the ", lens.size(), " sequences"));
  MaskRows rows;
  for (size_t s = 0; s < lens.size(); ++s) {
    const auto [first_query, num_queries, first_key, num_keys] =
        parts ? (*parts)[s] : std::array<int64_t, 4>{0, lens[s], 0, lens[s]};
    rows.add(of_sequences[s], lens[s], {first_query, num_queries, first_key, num_keys});
  }
  return MaskTables(std::move(rows));
}

auto tensor(const char* argument) {
  return [argument](const py::object& given) { return tensor_from(given, argument); };
}
auto tensors(const char* argument) {
  return [argument](const py::object& given) { return tensors_from(given, argument); };
}

auto tuple_of(const Step::Routed& out) { return std::tuple(out.x, out.features, out.sequence_features); }
auto tuple_of(const Step::AttentionInputs& out) { return std::tuple(out.seq_lens, out.q, out.k, out.v); }
auto as_tuple(auto method) {
  return [method](const Step& self, const auto&... given) { return tuple_of((self.*method)(given...)); };
}

}  // namespace

void bind_step(py::module_& m) {
  py::class_<MaskTables, std::shared_ptr<MaskTables>>(m, "MaskTables", "What packed queries of attention see.")
      .def(py::init(&tables_of), py::arg("masks"), py::arg("seq_lens"), py::arg("parts") = py::none())
      .def_readonly_static("block_size", &MaskTables::kBlockSize, "Queries, and keys, of a block.")
      .def_property_readonly("num_queries", [](const MaskTables& t) { return t.rows().num_queries; })
      .def_property_readonly("num_keys", [](const MaskTables& t) { return t.rows().num_keys; })
      .def(
          "blocks_on",
          [](MaskTables& t, const at::Device& device) {
            const MaskTables::Blocks& blocks = t.blocks_on(device);
            return std::make_tuple(blocks.bounds, blocks.lists);
          },
          py::arg("device"),
          "For FlexAttention: by range the first keys and ends of queries, and lists of blocks (mask_tables.h).");
  m.def("masked_attention", &masked_attention, py::call_guard<py::gil_scoped_release>(), py::arg("q"), py::arg("k"),
        py::arg("v"), py::arg("tables").none(false), "Of tensors on the CPU (masked_attention.h).");
  py::class_<Step>(m, "Step", "What knapformer.Step is made of.")
      .def(py::init<const Step&>())
      .def_property_readonly("plan", &Step::step_plan)
      .def_property_readonly("seq_lens", &Step::seq_lens)
      .def_property_readonly("chunk_lens", &Step::chunk_lens)
      .def_property_readonly("common_mask", &Step::common_mask)
      .def("route", converting<const Step>(as_tuple(&Step::route), tensor("x"), tensors("features"),
                                           tensors("sequence_features")))
      .def("reverse_route", converting<const Step>(&Step::reverse_route, tensor("x")))
      .def("pre_attn",
           converting<const Step>(as_tuple(&Step::pre_attn), tensor("q"), tensor("k"), tensor("v"), kernel_mask_from))
      .def("post_attn", converting<const Step>(&Step::post_attn, tensor("o")))
      .def("attention",
           [](const Step& self, const py::object& q, const py::object& k, const py::object& v, const py::object& attend,
              bool cuts, bool by_masks, const py::object& own_mask, const py::object& mask) {
             return convert_then_call(
                 self,
                 [&] {
                   return std::tuple(tensor_from(q, "q"), tensor_from(k, "k"), tensor_from(v, "v"),
                                     attend_from(self, attend, cuts, by_masks), mask_applied(own_mask, mask, by_masks));
                 },
                 &Step::attention);
           });
}
