#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include "knapformer/bindings/arguments.h"
#include "knapformer/core/model/data_mix.h"
#include "knapformer/core/model/mask.h"
#include "knapformer/core/model/topology.h"
#include "knapformer/core/plan/micro_batch_plan.h"
#include "knapformer/core/util/error.h"

namespace py = pybind11;
using namespace knapformer;  // NOLINT: this file is nothing but names of the core

namespace {

uint64_t seed_from(py::handle seed) {
  try {
    return seed.cast<uint64_t>();
  } catch (const py::cast_error&) {
    throw_argument("seed", shown(seed), "an integer from 0 to 2^64 - 1");
  }
}

void bind_masks(py::module_& m) {
  m.attr("MASK_FORMS") = Mask::kForms;
  m.attr("DEFAULT_GAMMA") = kDefaultGamma;
  m.attr("MAX_MAGNITUDE") = kMaxMagnitude;
  m.attr("MAX_SEQUENCE_TOKENS") = SequenceLengths::kMaxSequenceTokens;
  m.def("check_mask", [](py::handle mask) { return mask_from(mask).str(); });  // raises ArgumentError
  m.def("attention_pairs", [](py::handle mask, py::handle seq_len) {
    return mask_from(mask).pairs(integer_from<int64_t>(seq_len, "seq_len", 1, SequenceLengths::kMaxSequenceTokens));
  });
}

void bind_topology(py::module_& m) {
  m.def("nested_topology",
        [](int32_t bag_ranks, int32_t num_bags) { return Topology::nested(bag_ranks, num_bags).str(); });
  py::class_<Topology>(m, "Topology", "Ranks cut into bags, written like 'g1n2+g2n1+g4n1' (nested bags: 'g8/4/2/1n4').")
      .def(py::init([](const py::object& text_form, const py::object& num_ranks) {
             const std::string topology = text_from(text_form, "topology");
             return num_ranks.is_none() ? Topology::parse(topology)
                                        : Topology::parse(topology, integer_from(num_ranks, "num_ranks"));
           }),
           py::arg("text"), py::arg("num_ranks") = py::none(),
           "Parses one replica, repeated over `num_ranks` ranks where given. Raises ArgumentError.")
      .def_property_readonly("num_ranks", &Topology::num_ranks, "How many ranks all replicas have.")
      .def_property_readonly(
          "bags",
          [](const Topology& t) {
            // Ranges, as a million ranks would need a million lists, or a list of a million.
            const py::handle range(reinterpret_cast<PyObject*>(&PyRange_Type));
            py::list bags(t.bags().size());
            for (size_t b = 0; b < t.bags().size(); ++b) {
              const Bag& bag = t.bags()[b];
              bags[b] = range(bag.first_rank.value, bag.first_rank.value + bag.num_ranks);
            }
            return bags;
          },
          "The ranks of each bag, over all replicas.")
      .def(py::self == py::self)
      .def(py::pickle(
          [](const Topology& t) { return std::pair(t.str(), int64_t{t.num_ranks()}); },
          [](const std::pair<std::string, int64_t>& state) { return Topology::parse(state.first, state.second); }))
      .def("__str__", &Topology::str)
      .def("__repr__",
           [](const Topology& t) { return text("Topology('", t.str(), "', num_ranks=", t.num_ranks(), ")"); });
}

void bind_data_mix(py::module_& m) {
  py::class_<Sample>(m, "Sample", "The size of one sample.")
      .def(py::init([](const py::object& text_tokens, const py::object& visual_tokens) {
             return Sample{.text_tokens = integer_from<int64_t>(text_tokens, "text_tokens", 0),
                           .visual_tokens = integer_from<int64_t>(visual_tokens, "visual_tokens", 0)};
           }),
           py::arg("text_tokens"), py::arg("visual_tokens"), "Both are numbers of tokens. Raises ArgumentError.")
      .def_readonly("text_tokens", &Sample::text_tokens, "Tokens of its text.")
      .def_readonly("visual_tokens", &Sample::visual_tokens, "Tokens of its picture or video.")
      .def_property_readonly("num_tokens", &Sample::num_tokens, "Tokens of both.")
      .def("__repr__", [](const Sample& s) {
        return text("Sample(text_tokens=", s.text_tokens, ", visual_tokens=", s.visual_tokens, ")");
      });
  py::class_<DataMix>(m, "DataMix", "Seeded sequence lengths from data codes, reproducible on any machine.")
      .def_static(
          "parse",
          [](const py::object& codes, const py::object& resolution_scale, const py::object& max_text_tokens) {
            return DataMix::parse(text_from(codes, "text"), number_from(resolution_scale, "resolution_scale"),
                                  integer_from(max_text_tokens, "max_text_tokens"));
          },
          py::arg("text"), py::arg("resolution_scale") = 1.0, py::arg("max_text_tokens") = DataMix::kMaxTextTokens,
          "Data codes such as 'g8b4i256f1s0,g4b1i2048f1s0', or 'low', 'mixed', 'joint'. Raises ArgumentError.")
      .def_static("names", &DataMix::names, "The names of the published mixes.")
      .def_property_readonly("num_ranks", &DataMix::num_ranks, "How many ranks one repetition of the codes has.")
      .def(
          "check_divides",
          [](const DataMix& mix, const py::object& num_ranks) {
            mix.check_divides(integer_from(num_ranks, "num_ranks"));
          },
          py::arg("num_ranks"), "Raises ArgumentError where the mix's number of ranks does not divide num_ranks.")
      .def(
          "draw",
          [](const DataMix& mix, const py::object& seed, const py::object& step, const py::object& rank) {
            return mix.draw(seed_from(seed), integer_from(step, "step"), Rank(integer_from<int32_t>(rank, "rank", 0)));
          },
          py::arg("seed"), py::arg("step"), py::arg("rank"), "The samples that a rank draws in a step.")
      .def(
          "draw_lengths",
          [](const DataMix& mix, const py::object& seed, const py::object& step, const py::object& num_ranks) {
            return mix.draw_lengths(seed_from(seed), integer_from(step, "step"),
                                    integer_from<int32_t>(num_ranks, "num_ranks"));
          },
          py::arg("seed"), py::arg("step"), py::arg("num_ranks"),
          "Per rank, the lengths of its samples in a step, in tokens.")
      .def(py::pickle(
          [](const DataMix& mix) { return std::pair(mix.str(), mix.max_text_tokens()); },
          [](const std::pair<std::string, int64_t>& state) { return DataMix::parse(state.first, 1, state.second); }))
      .def("__str__", &DataMix::str)
      .def("__repr__", [](const DataMix& mix) { return text("DataMix('", mix.str(), "')"); });
}

}  // namespace

void bind_model(py::module_& m) {
  bind_masks(m);
  bind_topology(m);
  bind_data_mix(m);
}
