#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include "knapformer/bindings/core_bindings.h"
#include "knapformer/core/error.h"
#include "knapformer/core/step_time.h"

namespace py = pybind11;
using namespace knapformer;  // NOLINT: this file is nothing but names of the core

namespace {

/// Sets the fields that `changes` names; every field is a keyword argument, and no other name is.
template <class Record>
void set_fields(py::handle record, const py::kwargs& changes, Record& value) {
  for (const auto& [name, field] : changes) {
    const auto argument = py::cast<std::string>(name);
    const auto got = py::cast<std::string>(py::repr(field));
    if (!py::hasattr(record, name)) throw_argument(argument, got, "no such argument");
    try {
      py::setattr(record, name, field);
    } catch (const py::error_already_set& error) {
      if (!error.matches(PyExc_TypeError)) throw;
      throw_argument(argument, got, "a number of the field's type");
    }
  }
  value.validate();
}

template <class Record>
std::unique_ptr<Record> make_record(Record defaults, const py::kwargs& changes) {
  auto record = std::make_unique<Record>(defaults);
  set_fields(py::cast(record.get(), py::return_value_policy::reference), changes, *record);
  return record;
}

void bind_hardware(py::module_& m) {
  py::class_<HardwareModel>(m, "HardwareModel",
                            "What a rank and its links do. Defaults are H100 nodes; see docs/cluster_model.md.")
      .def(py::init([](const py::kwargs& changes) { return make_record(HardwareModel{}, changes); }))
      .def_static(
          "published", [](const py::kwargs& changes) { return make_record(HardwareModel::published(), changes); },
          "The cluster and the implementation that the paper measured.")
      .def_readwrite("flops_per_s", &HardwareModel::flops_per_s)
      .def_readwrite("ranks_per_node", &HardwareModel::ranks_per_node)
      .def_readwrite("node_bytes_per_s", &HardwareModel::node_bytes_per_s)
      .def_readwrite("network_bytes_per_s", &HardwareModel::network_bytes_per_s)
      .def_readwrite("node_latency_s", &HardwareModel::node_latency_s)
      .def_readwrite("network_latency_s", &HardwareModel::network_latency_s)
      .def_readwrite("fixed_s", &HardwareModel::fixed_s)
      .def_readwrite("host_s_per_piece", &HardwareModel::host_s_per_piece)
      .def_readwrite("overlaps_attention", &HardwareModel::overlaps_attention)
      .def(py::self == py::self);

  py::class_<TrainedModel>(m, "TrainedModel", "What is trained. Defaults are the FLUX of the published table.")
      .def(py::init([](const py::kwargs& changes) { return make_record(TrainedModel{}, changes); }))
      .def_readwrite("num_blocks", &TrainedModel::num_blocks)
      .def_readwrite("num_parameters", &TrainedModel::num_parameters)
      .def_readwrite("bytes_per_number", &TrainedModel::bytes_per_number)
      .def_readwrite("recomputes", &TrainedModel::recomputes)
      .def_readwrite("shard_ranks", &TrainedModel::shard_ranks)
      .def_readwrite("side_bytes_per_token", &TrainedModel::side_bytes_per_token)
      .def(py::self == py::self);
}

}  // namespace

void bind_step_time(py::module_& m) {
  bind_hardware(m);
  py::class_<RankTime>(m, "RankTime",
                       "One block's forward pass on one rank, in seconds; fields follow one another in time.")
      .def_readonly("group", &RankTime::group)
      .def_readonly("token_s", &RankTime::token_s)
      .def_readonly("wait_before_s", &RankTime::wait_before_s)
      .def_readonly("pre_attn_s", &RankTime::pre_attn_s)
      .def_readonly("whole_attention_s", &RankTime::whole_attention_s)
      .def_readonly("shared_attention_s", &RankTime::shared_attention_s)
      .def_readonly("post_attn_s", &RankTime::post_attn_s)
      .def_readonly("wait_after_s", &RankTime::wait_after_s)
      .def_property_readonly("compute_s", &RankTime::compute_s);

  py::class_<StepTime>(m, "StepTime",
                       "Predicted forward and backward time of a step: the terms of its slowest group, in seconds.")
      .def_readonly("token_s", &StepTime::token_s)
      .def_readonly("attention_s", &StepTime::attention_s)
      .def_readonly("exchange_s", &StepTime::exchange_s, "Attention's all-to-alls, what is not hidden.")
      .def_readonly("route_s", &StepTime::route_s)
      .def_readonly("fsdp_s", &StepTime::fsdp_s, "What FSDP gathers and reduces and the blocks do not hide.")
      .def_readonly("host_s", &StepTime::host_s)
      .def_readonly("fixed_s", &StepTime::fixed_s)
      .def_property_readonly("total_s", &StepTime::total_s)
      .def_readonly("ideal_s", &StepTime::ideal_s, "The work divided evenly, and nothing else.")
      .def_property_readonly("efficiency", &StepTime::efficiency, "ideal_s over total_s.")
      .def_property_readonly("slowest_group", [](const StepTime& t) { return t.slowest_group.value; })
      .def_readonly("route_bytes", &StepTime::route_bytes, "Of all ranks, in a step.")
      .def_readonly("route_bytes_between_nodes", &StepTime::route_bytes_between_nodes)
      .def_readonly("attention_bytes", &StepTime::attention_bytes)
      .def_readonly("attention_bytes_between_nodes", &StepTime::attention_bytes_between_nodes)
      .def_readonly("ranks", &StepTime::ranks)
      .def("__repr__", [](const StepTime& t) {
        return text("StepTime(total_s=", t.total_s(), ", token_s=", t.token_s, ", attention_s=", t.attention_s,
                    ", exchange_s=", t.exchange_s, ", route_s=", t.route_s, ", fsdp_s=", t.fsdp_s,
                    ", host_s=", t.host_s, ", fixed_s=", t.fixed_s, ")");
      });

  m.def(
      "predict_step",
      [](const Plan& plan, const HardwareModel& hardware, const TrainedModel& model,
         const std::vector<std::tuple<double, double, double>>& measured) {
        std::vector<RankCompute> ranks;
        ranks.reserve(measured.size());
        for (const auto& [token_s, whole_s, shared_s] : measured) ranks.push_back({token_s, whole_s, shared_s});
        return predict_step(plan, hardware, model, ranks);
      },
      py::arg("plan"), py::arg("hardware") = HardwareModel{}, py::arg("model") = TrainedModel{},
      py::arg("measured") = std::vector<std::tuple<double, double, double>>(), py::call_guard<py::gil_scoped_release>(),
      "Predicted forward and backward time of a step under `plan`.\n\n"
      "measured: per rank the seconds of one block's forward pass in the per-token layers, in attention on whole "
      "sequences,\n"
      "and in attention on shared ones, in place of the plan's work over hardware.flops_per_s. Raises ArgumentError.");
  m.def(
      "plan_home", [](const Plan& plan) { return plan_home(plan.input()); }, py::arg("plan"),
      "The plan that leaves every sequence of `plan` at home, whole: the step without a balancer.");
}
