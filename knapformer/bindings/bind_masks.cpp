#include "knapformer/bindings/from_python.h"
#include "knapformer/bindings/torch_bindings.h"
#include "knapformer/torch/masked_attention.h"

namespace py = pybind11;
using namespace knapformer;  // NOLINT: this file is nothing but names of the library

namespace {

MaskTables tables_of(const py::object& masks, const py::object& seq_lens) {
  const std::vector<int64_t> lens = lengths_from(seq_lens);
  const std::vector<Mask> of_sequences = masks_from(masks);
  if (of_sequences.size() != lens.size())
    throw_argument("masks", text(of_sequences.size(), " masks"),
                   text("one for each of the ", lens.size(), " sequences"));
  MaskRows rows;
  for (size_t s = 0; s < lens.size(); ++s)
    rows.add(of_sequences[s], lens[s], {.first_query = 0, .num_queries = lens[s], .first_key = 0, .num_keys = lens[s]});
  return MaskTables(std::move(rows));
}

}  // namespace

void bind_masks(py::module_& m) {
  py::class_<MaskTables, std::shared_ptr<MaskTables>>(m, "MaskTables", "What packed queries of attention see.")
      .def(py::init(&tables_of), py::arg("masks"), py::arg("seq_lens"))
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
