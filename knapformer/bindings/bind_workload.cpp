#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include "knapformer/bindings/core_bindings.h"
#include "knapformer/core/model/mask.h"
#include "knapformer/core/model/workload.h"
#include "knapformer/core/plan/plan.h"
#include "knapformer/core/util/error.h"

namespace py = pybind11;
using namespace knapformer;  // NOLINT: this file is nothing but names of the core

void bind_workload(py::module_& m) {
  py::class_<WorkloadModel>(m, "WorkloadModel", "FLOPs of one transformer block: 24 l d^2 + gamma * 4 l^2 d.")
      .def(py::init([](double gamma) {
             const WorkloadModel model{.gamma = gamma};
             model.validate();
             return model;
           }),
           py::arg("gamma") = kDefaultGamma)
      .def_readonly("gamma", &WorkloadModel::gamma, "Attention's cost per FLOP over that of the matrix products.")
      .def(
          "work",
          [](const WorkloadModel& w, int64_t seq_len, int64_t d_model, const std::string& mask) {
            return w.work(seq_len, d_model, Mask::parse(mask));
          },
          py::arg("seq_len"), py::arg("d_model"), py::arg("mask") = "full", "FLOPs of a whole sequence, forward.")
      .def(py::self == py::self)
      .def("__repr__", [](const WorkloadModel& w) { return text("WorkloadModel(gamma=", w.gamma, ")"); });

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
      [](const std::vector<int64_t>& seq_lens, const std::vector<double>& latencies_s, int64_t d_model,
         const std::string& mask) { return fit_workload(seq_lens, latencies_s, d_model, Mask::parse(mask)); },
      py::arg("seq_lens"), py::arg("latencies_s"), py::arg("d_model"), py::arg("mask") = "full",
      "Fits k and gamma to measured latencies (seconds) of one block at these lengths (tokens), by least squares.\n\n"
      "Raises ArgumentError for fewer than two distinct lengths or latencies that are not positive and finite, "
      "StateError where the\n"
      "best k is not positive.");

  m.attr("MASK_FORMS") = Mask::kForms;
  m.attr("DEFAULT_GAMMA") = kDefaultGamma;
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
      text("(query, key) pairs that a mask leaves of a sequence. mask: ", Mask::kForms, ".\n\nRaises ArgumentError.")
          .c_str());
}
