#include "knapformer/bindings/from_python.h"
#include "knapformer/bindings/torch_bindings.h"
#include "knapformer/torch/masked_attention.h"

namespace py = pybind11;
using namespace knapformer;  // NOLINT: this file is nothing but names of the library

namespace {

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

}  // namespace

void bind_masks(py::module_& m) {
  py::class_<MaskTables, std::shared_ptr<MaskTables>>(m, "MaskTables", "What packed queries of attention see.")
      .def(py::init(&tables_of), py::arg("masks"), py::arg("seq_lens"), py::arg("parts") = py::none())
      .def_property_readonly("num_queries", [](const MaskTables& t) { return t.rows().num_queries; })
      .def_property_readonly("num_keys", [](const MaskTables& t) { return t.rows().num_keys; })
      .def_property_readonly("runs", &MaskTables::runs, "For the op knapformer::masked_attention (masked_attention.h).")
      .def(
          "blocks_on",
          [](MaskTables& t, const at::Device& device) {
            const MaskTables::Blocks& blocks = t.blocks_on(device);
            return std::make_tuple(blocks.bounds, blocks.lists);
          },
          py::arg("device"),
          "For FlexAttention: by range the first keys and ends of queries, and lists of blocks (masked_attention.h).");
}
