#include "knapformer/bindings/arguments.h"

#include <unistd.h>

namespace py = pybind11;

namespace knapformer {
namespace {

constexpr size_t kMostShown = 60;

py::object steal(PyObject* object) {
  if (object == nullptr) PyErr_Clear();
  return py::reinterpret_steal<py::object>(object);
}

}  // namespace

std::string type_of(py::handle object) { return py::str(py::type::handle_of(object).attr("__name__")); }

std::string shown(py::handle object) {
  const py::object repr = steal(PyObject_Repr(object.ptr()));
  const std::string form = repr ? as_text(repr).value_or("") : "";
  if (form.empty() || form.size() > kMostShown || form.find('\n') != std::string::npos)
    return text("an object of type ", type_of(object));
  return form;
}

std::string first_line(const std::exception& error) {
  const std::string message = error.what();
  return message.substr(0, message.find('\n'));
}

std::optional<int64_t> as_integer(py::handle object) {
  if (PyBool_Check(object.ptr()) || PyIndex_Check(object.ptr()) == 0) return std::nullopt;
  const bool is_exact = PyLong_CheckExact(object.ptr());
  const py::object index = is_exact ? py::reinterpret_borrow<py::object>(object) : steal(PyNumber_Index(object.ptr()));
  if (!index) return std::nullopt;
  int overflow = 0;
  const int64_t value = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow != 0) return std::nullopt;
  return value;
}

std::optional<double> as_number(py::handle object) {
  if (PyBool_Check(object.ptr()) || PyUnicode_Check(object.ptr()) || PyBytes_Check(object.ptr())) return std::nullopt;
  const py::object number = steal(PyNumber_Float(object.ptr()));
  if (!number) return std::nullopt;
  return PyFloat_AS_DOUBLE(number.ptr());
}

std::optional<std::string> as_text(py::handle object) {
  if (!PyUnicode_Check(object.ptr())) return std::nullopt;
  Py_ssize_t size = 0;
  const char* utf8 = PyUnicode_AsUTF8AndSize(object.ptr(), &size);
  if (utf8 == nullptr) {
    PyErr_Clear();
    return std::nullopt;
  }
  std::string value(utf8, static_cast<size_t>(size));
  // A zero byte would end the message of an error that quotes the text.
  if (value.find('\0') != std::string::npos) return std::nullopt;
  return value;
}

std::optional<Mask> as_mask(py::handle object) {
  const std::optional<std::string> name = as_text(object);
  return name ? std::optional(Mask::parse(*name)) : std::nullopt;
}

void check_signals() {
  if (::gettid() != ::getpid() || Py_IsInitialized() == 0) return;  // not the main thread
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

double number_from(py::handle object, std::string_view argument) {
  const std::optional<double> value = as_number(object);
  if (!value) throw_argument(argument, shown(object), "a number");
  return *value;
}

std::string text_from(py::handle object, std::string_view argument) {
  std::optional<std::string> value = as_text(object);
  if (!value) throw_argument(argument, shown(object), "text");
  return *std::move(value);
}

bool flag_from(py::handle object, std::string_view argument) {
  if (!PyBool_Check(object.ptr())) throw_argument(argument, shown(object), "True or False");
  return object.is(py::handle(Py_True));
}

std::string solver_from(py::handle object) {
  return object.is_none() ? std::string(planners().front().name) : text_from(object, "solver");
}

Mask mask_from(py::handle mask) { return Mask::parse(text_from(mask, "mask")); }

int64_t width_from(py::handle object) {
  if (object.is_none()) throw_argument("d_model", "None", "the width of the blocks, in features");
  return integer_from(object, "d_model");
}

Effort effort_from(py::handle object) {
  if (object.is_none()) return {};
  if (const std::optional<std::string> name = as_text(object)) return Effort::parse(*name);
  return {.moves = integer_from<int64_t>(object, "effort", 0, Effort::kMaxMoves, Effort::expected())};
}

Cluster cluster_from(py::handle object) {
  if (object.is_none()) return {};
  if (const std::optional<std::string> name = as_text(object)) return Cluster::named(*name);
  return instance_from<Cluster>(object, "cluster", "a Cluster, a name of one, or None");
}

TrainedModel model_from(py::handle object) {
  if (object.is_none()) return {};
  return instance_from<TrainedModel>(object, "model", "a TrainedModel, or None");
}

PlanInput settings_from(py::handle cost, py::handle max_tokens_per_rank) {
  PlanInput input;
  input.workload.gamma = number_from(cost.attr("gamma"), "gamma");
  input.cluster = cluster_from(cost.attr("cluster"));
  input.model = model_from(cost.attr("model"));
  input.rank_speed = numbers_from(cost.attr("rank_speed"), "rank_speed");
  input.max_tokens_per_rank = integer_from(max_tokens_per_rank, "max_tokens_per_rank");
  const auto heads = integer_from<int32_t>(cost.attr("num_heads"), "num_heads");
  if (heads != 0) input.model.num_heads = heads;
  return input;
}

void for_each_item(py::handle list, std::string_view argument, std::string_view expected,
                   const std::function<void(py::handle)>& visit) {
  const bool is_text = PyUnicode_Check(list.ptr()) || PyBytes_Check(list.ptr());
  const py::object iterator = is_text ? py::object() : steal(PyObject_GetIter(list.ptr()));
  if (!iterator) throw_argument(argument, shown(list), expected);
  while (const auto item = py::reinterpret_steal<py::object>(PyIter_Next(iterator.ptr()))) visit(item);
  if (PyErr_Occurred() == nullptr) return;
  const py::error_already_set error;
  if (!error.matches(PyExc_Exception)) throw error;  // the user's interrupt, say
  throw_argument(argument, text("what raises ", first_line(error)), expected);
}

}  // namespace knapformer
