#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include "knapformer/bindings/arguments.h"
#include "knapformer/bindings/core_bindings.h"
#include "knapformer/core/model/topology.h"
#include "knapformer/core/util/error.h"

namespace py = pybind11;
using namespace knapformer;  // NOLINT: this file is nothing but names of the core

void bind_topology(py::module_& m) {
  py::class_<Topology>(m, "Topology", "Ranks cut into bags, written like 'g1n2+g2n1+g4n1' (nested bags: 'g8/4/2/1n4').")
      .def(py::init([](const GivenText& text_form, const Given<"typing.SupportsIndex | None">& num_ranks) {
             const std::string topology = text_from(text_form, "topology");
             return num_ranks.is_none() ? Topology::parse(topology)
                                        : Topology::parse(topology, integer_from(num_ranks, "num_ranks"));
           }),
           py::arg("text"), py::arg("num_ranks") = py::none(),
           "Parses one replica, repeated over `num_ranks` ranks where given. Raises ArgumentError.")
      .def_property_readonly("num_ranks", &Topology::num_ranks, "Of all replicas.")
      .def_property_readonly("num_replicas", &Topology::num_replicas, "How often the text's bags are repeated.")
      .def_property_readonly("num_ranks_per_replica", &Topology::num_ranks_per_replica, "Of the text's bags, once.")
      .def_property_readonly("is_flat", &Topology::is_flat,
                             "Whether every bag shares its sequences by all of its ranks: none is nested.")
      .def_property_readonly(
          "bags",
          [](const Topology& t) {
            std::vector<std::vector<int32_t>> bags;
            for (const Bag& bag : t.bags()) {
              auto& ranks = bags.emplace_back();
              for (int32_t i = 0; i < bag.num_ranks; ++i) ranks.push_back(bag.first_rank.value + i);
            }
            return bags;
          },
          "The ranks of each bag, of all replicas.")
      .def(
          "bag_of",
          [](const Topology& t, int64_t rank) {
            if (rank < 0 || rank >= t.num_ranks()) throw_argument("rank", rank, text("0 to ", t.num_ranks() - 1));
            return t.bag_of(Rank(rank)).value;
          },
          py::arg("rank"), "The number of the bag that a rank is in.")
      .def(py::self == py::self)
      .def("__str__", &Topology::str)
      .def("__repr__",
           [](const Topology& t) { return text("Topology('", t.str(), "', num_ranks=", t.num_ranks(), ")"); });
}
