#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include "knapformer/bindings/arguments.h"
#include "knapformer/bindings/core_bindings.h"
#include "knapformer/core/cost/step_time.h"
#include "knapformer/core/plan/step_plan.h"
#include "knapformer/core/util/error.h"

namespace py = pybind11;
using namespace knapformer;  // NOLINT: this file is nothing but names of the core

namespace {

std::string to_python(StepMode mode) { return std::string(step_mode_name(mode)); }
template <class T>
T to_python(T value) {
  return value;
}

void set_field(double& field, py::handle value, const char* name) { field = number_from(value, name); }
void set_field(int32_t& field, py::handle value, const char* name) { field = integer_from<int32_t>(value, name); }
void set_field(StepMode& field, py::handle value, const char* name) { field = parse_step_mode(text_from(value, name)); }
void set_field(bool& field, py::handle value, const char* name) { field = flag_from(value, name); }

/// The record with the fields that `changes` names; every field is a keyword argument, and no other name is.
template <class Record>
Record changed(Record record, const py::dict& changes) {
  for (const auto& [name, value] : changes) {
    const auto argument = py::cast<std::string>(name);
    bool found = false;
    for_each_field<Record>([&, &value = value](const auto& f) {
      if (argument != f.name) return;
      set_field(record.*f.member, value, f.name);
      found = true;
    });
    if (!found) throw_argument(argument, shown(value), "no such argument");
  }
  record.validate();
  return record;
}

template <class Record>
py::dict fields_of(const Record& record) {
  py::dict fields;
  for_each_field<Record>([&](const auto& f) { fields[f.name] = to_python(record.*f.member); });
  return fields;
}

/// A record for Python: constant, and derived from its list of fields alone.
template <class Record>
py::class_<Record> bind_record(py::module_& m, const char* name, const std::string& doc) {
  std::string all = doc + "\n\nFields, each a keyword argument:";
  for_each_field<Record>([&](const auto& f) { all += text("\n    ", f.name, ": ", f.doc); });
  py::class_<Record> record(m, name, all.c_str());
  for_each_field<Record>([&](const auto& f) {
    record.def_property_readonly(f.name, [member = f.member](const Record& r) { return to_python(r.*member); }, f.doc);
  });
  record
      .def(
          "replace", [](const Record& r, const py::kwargs& changes) { return changed(r, changes); },
          "A copy with other values of some fields. Raises ArgumentError.")
      .def("to_dict", &fields_of<Record>, "The fields by name: keyword arguments that make an equal record.")
      .def(py::self == py::self)
      .def(py::pickle(&fields_of<Record>, [](const py::dict& fields) { return changed(Record(), fields); }))
      .def("__repr__", [name](const Record& r) {
        std::string fields;
        for_each_field<Record>([&](const auto& f) {
          fields +=
              text(fields.empty() ? "" : ", ", f.name, "=", std::string(py::repr(py::cast(to_python(r.*f.member)))));
        });
        return text(name, "(", fields, ")");
      });
  return record;
}

py::dict terms_of(const StepTime& time) {
  py::dict terms;
  for_each_field<StepTerms>([&](const auto& f) { terms[f.name] = time.*f.member; });
  return terms;
}

py::dict term_labels() {
  py::dict labels;
  for_each_field<StepTerms>([&](const auto& f) { labels[f.name] = f.doc; });
  return labels;
}

void bind_step_time(py::module_& m) {
  py::class_<PassTime>(m, "PassTime",
                       "One pass over one block on one rank, in seconds. The fields follow one another in time; in the "
                       "backward pass, from the last to the first.")
      .def_readonly("token_s", &PassTime::token_s, "Per-token layers.")
      .def_readonly("wait_before_s", &PassTime::wait_before_s, "The wait for the group's longest per-token phase.")
      .def_readonly("pre_attn_s", &PassTime::pre_attn_s, "The exchange before attention, hidden or not.")
      .def_readonly("hidden_s", &PassTime::hidden_s, "The part of pre_attn_s that hides behind attention.")
      .def_readonly("whole_attention_s", &PassTime::whole_attention_s,
                    "Attention on sequences that are whole on the rank.")
      .def_readonly("shared_attention_s", &PassTime::shared_attention_s,
                    "Attention on sequences that other ranks share.")
      .def_readonly("post_attn_s", &PassTime::post_attn_s, "The exchange after attention.")
      .def_readonly("wait_after_s", &PassTime::wait_after_s, "The wait for the group's longest attention phase.");

  py::class_<RankTime>(m, "RankTime", "A block on one rank: its passes.")
      .def_property_readonly(
          "group", [](const RankTime& t) { return t.group.value; }, "The first rank of its connected group.")
      .def_readonly("forward", &RankTime::forward, "The forward pass; a recomputation takes as long.")
      .def_readonly("backward", &RankTime::backward, "The backward pass; zeros where there is none.");

  py::class_<Traffic>(m, "Traffic", "Bytes, by where they go.")
      .def_readonly("inside", &Traffic::inside, "To ranks of the same node.")
      .def_readonly("between", &Traffic::between, "To ranks of other nodes.")
      .def_property_readonly("total", &Traffic::total, "inside plus between.");

  py::class_<StepTime> step(m, "StepTime",
                            "Predicted time of a step: the terms of its slowest replica and group, in seconds.");
  for_each_field<StepTerms>([&](const auto& f) {
    step.def_property_readonly(f.name, [member = f.member](const StepTime& t) { return t.*member; }, f.doc);
  });
  step.def_property_readonly("terms", &terms_of, "Seconds of each term, by name; they add up to total_s.")
      .def_static("labels", &term_labels, "What each of terms is, in words, in the same order.")
      .def_property_readonly("blocks_s", &StepTime::blocks_s, "The sum of token_s, attention_s, exchange_s and host_s.")
      .def_property_readonly("total_s", &StepTime::total_s, "The sum of all terms.")
      .def_readonly("ideal_s", &StepTime::ideal_s, "Seconds of the work alone, divided evenly.")
      .def_property_readonly("efficiency", &StepTime::efficiency, "ideal_s over total_s.")
      .def_property_readonly("over_ideal", &StepTime::over_ideal, "total_s over (ideal_s + fixed_s).")
      .def_property_readonly(
          "slowest_group", [](const StepTime& t) { return t.slowest_group.value; },
          "The first rank of the slowest group.")
      .def_readonly("route_bytes", &StepTime::route_bytes, "Bytes that all ranks send by routes in a step.")
      .def_readonly("attention_bytes", &StepTime::attention_bytes, "Bytes that all ranks send for attention in a step.")
      .def_readonly("fsdp_bytes", &StepTime::fsdp_bytes, "Bytes that all ranks send for FSDP in a step, hidden or not.")
      .def_readonly("ranks", &StepTime::ranks, "Per rank, the time of one block.")
      .def("__repr__", [](const StepTime& t) {
        std::string terms;
        for_each_field<StepTerms>([&](const auto& f) { terms += text(", ", f.name, "=", t.*f.member); });
        return text("StepTime(total_s=", t.total_s(), terms, ")");
      });
}

/// Of one micro-batch.
const Plan& plan_from(py::handle plan) {
  const auto& step = instance_from<StepPlan>(plan, "plan", "a Plan");
  if (step.num_micro_batches() > 1)
    throw_argument("plan", text("one of ", step.num_micro_batches(), " micro-batches"), "one of its plans");
  return step.plans()[0];
}

StepPlan step_of(Plan plan) { return StepPlan(std::move(plan)); }

}  // namespace

void bind_cost_parameters(py::module_& m) {
  bind_record<Cluster>(m, "Cluster",
                       "What a rank computes and what its links carry: the cost model's parameters of the machine.\n\n"
                       "Cluster() is Cluster('h100'); other names are in Cluster.names(). docs/cluster_model.md has "
                       "their sources.")
      .def(py::init([](const py::object& name, const py::kwargs& changes) {
             return changed(Cluster::named(text_from(name, "cluster")), changes);
           }),
           py::arg("name") = "h100", "A named cluster with other values of some fields. Raises ArgumentError.")
      .def_static(
          "published", [](const py::kwargs& changes) { return changed(Cluster::published(), changes); },
          "The cluster and the implementation that the paper measured.")
      .def_static("names", &Cluster::names, "The clusters that have a name.");
  bind_record<TrainedModel>(m, "TrainedModel",
                            "What a step runs, as far as its cost depends on it. The default is the FLUX of the "
                            "published table.")
      .def_property_readonly(
          "token_passes", [](const TrainedModel& of) { return of.passes().token(); },
          "Passes over the per-token layers in a step, in units of the forward pass: 4 in training with recomputation.")
      .def_property_readonly(
          "attention_passes", [](const TrainedModel& of) { return of.passes().attention(); }, "The same, of attention.")
      .def(py::init([](const py::kwargs& changes) { return changed(TrainedModel{}, changes); }),
           "The default with other values of some fields. Raises ArgumentError.");
}

void bind_cost(py::module_& m) {
  bind_step_time(m);
  m.def("predict_step", [](py::handle plan, py::handle cluster, py::handle model, py::handle measured) {
    const Plan& of = plan_from(plan);
    const Cluster on = cluster.is_none() ? of.input().cluster : cluster_from(cluster);
    const TrainedModel trained = model.is_none() ? of.input().model : model_from(model);
    std::vector<RankCompute> ranks;
    for_each_item(measured, "measured", "for each rank three numbers", [&](py::handle of_rank) {
      const std::string name = text("measured[", ranks.size(), "]");
      const std::vector<double> seconds = numbers_from(of_rank, name);
      if (seconds.size() != 3) throw_argument(name, shown(of_rank), "three numbers");
      ranks.push_back({seconds[0], seconds[1], seconds[2]});
    });
    const py::gil_scoped_release release;
    return predict_step(of, on, trained, ranks);
  });
  m.def("plan_home", [](py::handle plan) { return step_of(plan_home(plan_from(plan).input())); });
  m.def("plan_home_bags", [](py::handle plan) { return step_of(plan_home_bags(plan_from(plan).input())); });
}
