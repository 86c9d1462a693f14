#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include "knapformer/bindings/core_bindings.h"
#include "knapformer/core/error.h"
#include "knapformer/core/mask.h"
#include "knapformer/core/plan.h"
#include "knapformer/core/workload.h"

namespace py = pybind11;
using namespace knapformer;  // NOLINT: this file is nothing but names of the core

void bind_workload(py::module_& m) {
  py::class_<WorkloadModel>(m, "WorkloadModel",
                            "FLOPs of one transformer block: 24 l d^2 + gamma * mask_factor * 4 l^2 d.")
      .def(py::init([](double gamma, double mask_factor) {
             const WorkloadModel model{.gamma = gamma, .mask_factor = mask_factor};
             model.validate();
             return model;
           }),
           py::arg("gamma") = 1.0, py::arg("mask_factor") = 1.0)
      .def_readonly("gamma", &WorkloadModel::gamma)
      .def_readonly("mask_factor", &WorkloadModel::mask_factor)
      .def("work", &WorkloadModel::work, py::arg("seq_len"), py::arg("d_model"), "FLOPs of a whole sequence, forward.")
      .def(py::self == py::self)
      .def("__repr__", [](const WorkloadModel& w) {
        return text("WorkloadModel(gamma=", w.gamma, ", mask_factor=", w.mask_factor, ")");
      });

  py::class_<WorkloadFit>(m, "WorkloadFit", "k and gamma of t = k (24 l d^2 + gamma 4 l^2 d), fitted by least squares.")
      .def_readonly("seconds_per_flop", &WorkloadFit::seconds_per_flop, "k, in seconds per FLOP.")
      .def_readonly("gamma", &WorkloadFit::gamma, "Cost of attention's FLOPs over that of the matrix products'.")
      .def_readonly("relative_rms_error", &WorkloadFit::relative_rms_error,
                    "Root mean square of (fitted - measured) / measured.")
      .def_readonly("relative_rms_error_without_gamma", &WorkloadFit::relative_rms_error_without_gamma,
                    "The same, of the best k with gamma 1.")
      .def("__repr__", [](const WorkloadFit& f) {
        return text("WorkloadFit(seconds_per_flop=", f.seconds_per_flop, ", gamma=", f.gamma,
                    ", relative_rms_error=", f.relative_rms_error, ")");
      });
  m.def(
      "fit_workload",
      [](const std::vector<int64_t>& seq_lens, const std::vector<double>& latencies_s, int64_t d_model) {
        return fit_workload(seq_lens, latencies_s, d_model);
      },
      py::arg("seq_lens"), py::arg("latencies_s"), py::arg("d_model"),
      "Fits k and gamma to measured latencies (seconds) of one block at these lengths (tokens), by least squares.\n\n"
      "Raises ArgumentError for fewer than two distinct lengths or latencies that are not positive and finite, "
      "StateError where the\n"
      "best k is not positive.");

  m.attr("MAX_SEQUENCE_TOKENS") = SequenceLengths::kMaxSequenceTokens;
  m.def(
      "attention_pairs",
      [](const std::string& mask, int64_t seq_len) {
        if (seq_len < 1 || seq_len > SequenceLengths::kMaxSequenceTokens) {
          throw_argument("seq_len", seq_len, text("1 to ", SequenceLengths::kMaxSequenceTokens, " tokens"));
        }
        return Mask::parse(mask).pairs(seq_len);
      },
      py::arg("mask"), py::arg("seq_len"),
      "(query, key) pairs that a mask leaves of a sequence: 'full', 'causal', 'prefix:TEXT', "
      "'block_causal:TEXT:FRAME',\n"
      "'window:LEFT:RIGHT'. Raises ArgumentError.");
}
