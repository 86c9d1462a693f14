#include <pybind11/stl.h>

#include "knapformer/bindings/core_bindings.h"
#include "knapformer/core/model/data_mix.h"
#include "knapformer/core/util/error.h"

namespace py = pybind11;
using namespace knapformer;  // NOLINT: this file is nothing but names of the core

void bind_data_mix(py::module_& m) {
  py::class_<Sample>(m, "Sample", "The size of one sample.")
      .def_readonly("text_tokens", &Sample::text_tokens, "Of its text.")
      .def_readonly("visual_tokens", &Sample::visual_tokens, "Of its picture or video.")
      .def_property_readonly("num_tokens", &Sample::num_tokens, "Of both.")
      .def("__repr__", [](const Sample& s) {
        return text("Sample(text_tokens=", s.text_tokens, ", visual_tokens=", s.visual_tokens, ")");
      });
  py::class_<DataMix>(m, "DataMix", "Seeded sequence lengths from data codes, reproducible on any machine.")
      .def_static("parse", &DataMix::parse, py::arg("text"), py::arg("resolution_scale") = 1.0,
                  py::arg("max_text_tokens") = DataMix::kMaxTextTokens,
                  "Data codes such as 'g8b4i256f1s0,g4b1i2048f1s0', or 'low', 'mixed', 'joint'. Raises ArgumentError.")
      .def_static(
          "names", [] { return std::vector<std::string>(DataMix::names().begin(), DataMix::names().end()); },
          "Of the published mixes.")
      .def_property_readonly("num_ranks", &DataMix::num_ranks, "Of one repetition of the codes.")
      .def("check_divides", &DataMix::check_divides, py::arg("num_ranks"),
           "Raises ArgumentError where the mix does not divide them.")
      .def(
          "draw",
          [](const DataMix& mix, uint64_t seed, int64_t step, int64_t rank) {
            return mix.draw(seed, step, Rank(rank));
          },
          py::arg("seed"), py::arg("step"), py::arg("rank"), "The samples that a rank draws in a step.")
      .def("draw_lengths", &DataMix::draw_lengths, py::arg("seed"), py::arg("step"), py::arg("num_ranks"),
           "Per rank, the lengths of its samples in a step, in tokens.")
      .def("__str__", &DataMix::str)
      .def("__repr__", [](const DataMix& mix) { return text("DataMix('", mix.str(), "')"); });
}
