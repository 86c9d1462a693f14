#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include "knapformer/bindings/arguments.h"
#include "knapformer/core/cost/step_time.h"
#include "knapformer/core/plan/plan.h"
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

/// "gamma=0.41, ..."
template <class Record>
std::string text_of_fields(const Record& record) {
  std::string fields;
  for_each_field<Record>([&](const auto& f) {
    const std::string value = py::repr(py::cast(to_python(record.*f.member)));
    fields += text(fields.empty() ? "" : ", ", f.name, "=", value);
  });
  return fields;
}

/// The fields as read-only properties.
template <class Record, class Bound>
void bind_fields(py::class_<Bound>& bound) {
  for_each_field<Record>([&](const auto& f) {
    bound.def_property_readonly(f.name, [member = f.member](const Bound& b) { return to_python(b.*member); }, f.doc);
  });
}

/// A record for Python: constant, and derived from its list of fields alone.
template <class Record>
py::class_<Record> bind_record(py::module_& m, const char* name, const std::string& doc) {
  std::string all = doc + "\n\nFields, each a keyword argument:";
  for_each_field<Record>([&](const auto& f) { all += text("\n    ", f.name, ": ", f.doc); });
  py::class_<Record> record(m, name, all.c_str());
  bind_fields<Record>(record);
  record
      .def(
          "replace", [](const Record& r, const py::kwargs& changes) { return changed(r, changes); },
          "A copy with other values of some fields. Raises ArgumentError.")
      .def("to_dict", &fields_of<Record>, "The fields by name: keyword arguments that make an equal record.")
      .def(py::self == py::self)
      .def(py::pickle(&fields_of<Record>, [](const py::dict& fields) { return changed(Record(), fields); }))
      .def("__repr__", [name](const Record& r) { return text(name, "(", text_of_fields(r), ")"); });
  return record;
}

py::dict term_labels() {
  py::dict labels;
  for_each_field<StepTerms>([&](const auto& f) { labels[f.name] = f.doc; });
  return labels;
}

void bind_step_time(py::module_& m) {
  py::class_<Traffic>(m, "Traffic", "Bytes, by where they go.")
      .def_readonly("inside", &Traffic::inside, "To ranks of the same node.")
      .def_readonly("between", &Traffic::between, "To ranks of other nodes.")
      .def_property_readonly("total", &Traffic::total, "inside plus between.");

  py::class_<MicroBatchTime> step(m, "MicroBatchTime",
                                  "Predicted seconds of a micro-batch: terms of its slowest replica and group.");
  bind_fields<StepTerms>(step);
  const auto property = properties_of(step);
  property("terms", "Seconds of each term, by name; they add up to total_s.",
           [](const MicroBatchTime& t) { return fields_of<StepTerms>(t); });
  property("total_s", "The sum of all terms.", &MicroBatchTime::total_s);
  property("ideal_s", "Seconds of the work alone, divided evenly.", &MicroBatchTime::ideal_s);
  property("efficiency", "ideal_s over total_s.", &MicroBatchTime::efficiency);
  property("over_ideal", "total_s over (ideal_s + fixed_s).", &MicroBatchTime::over_ideal);
  property("route_bytes", "Bytes that all ranks send by routes in a step.", &MicroBatchTime::route_bytes);
  property("attention_bytes", "Bytes that all ranks send for attention in a step.", &MicroBatchTime::attention_bytes);
  property("fsdp_bytes", "Bytes that all ranks send for FSDP in a step, hidden or not.", &MicroBatchTime::fsdp_bytes);
  step.def_static("labels", &term_labels, "What each of terms is, in words, in the same order.")
      .def("__repr__", [](const MicroBatchTime& t) {
        return text("MicroBatchTime(total_s=", t.total_s(), ", ", text_of_fields<StepTerms>(t), ")");
      });
}

/// Of one micro-batch.
const MicroBatchPlan& plan_from(py::handle plan) {
  const auto& step = instance_from<Plan>(plan, "plan", "a Plan");
  if (step.num_micro_batches() > 1)
    throw_argument("plan", text("one of ", step.num_micro_batches(), " micro-batches"), "one of its plans");
  return step.plans()[0];
}

}  // namespace

void bind_cost(py::module_& m) {
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
  bind_record<WorkloadModel>(m, "WorkloadModel", "FLOPs of one transformer block: 24 l d^2 + gamma * 4 l^2 d.")
      .def(py::init(
               [](const py::object& gamma) { return changed(WorkloadModel{}, py::dict(py::arg("gamma") = gamma)); }),
           py::arg("gamma") = kDefaultGamma)
      .def(
          "work",
          [](const WorkloadModel& w, const py::object& seq_len, const py::object& d_model, const py::object& mask) {
            return w.work(integer_from(seq_len, "seq_len"), integer_from(d_model, "d_model"), mask_from(mask));
          },
          py::arg("seq_len"), py::arg("d_model"), py::arg("mask") = "full", "FLOPs of a whole sequence, forward.");
  bind_step_time(m);
  m.def("predict_micro_batch", [](py::handle plan, py::handle measured) {
    const MicroBatchPlan& of = plan_from(plan);
    std::vector<RankCompute> ranks;
    for_each_item(measured, "measured", "for each rank three numbers", [&](py::handle of_rank) {
      const std::string name = text("measured[", ranks.size(), "]");
      const std::vector<double> seconds = numbers_from(of_rank, name);
      if (seconds.size() != 3) throw_argument(name, shown(of_rank), "three numbers");
      ranks.push_back({seconds[0], seconds[1], seconds[2]});
    });
    const py::gil_scoped_release release;
    return predict_micro_batch(of, ranks);
  });
  m.def("plan_home", [](py::handle plan) { return Plan(plan_home(plan_from(plan).input())); });
  m.def("plan_home_bags", [](py::handle plan) { return Plan(plan_home_bags(plan_from(plan).input())); });
}
