#include "knapformer/bindings/call_errors.h"

#include <algorithm>
#include <optional>
#include <ranges>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "knapformer/bindings/arguments.h"
#include "knapformer/core/util/error.h"

namespace py = pybind11;

namespace knapformer {
namespace {

struct Call {
  std::vector<py::handle> positional;
  std::vector<std::pair<std::string, py::handle>> keywords;
};

struct Parameter {
  std::string name, type;
  bool has_default = false, keyword_only = false;
};

struct Signature {
  std::vector<Parameter> parameters;
  bool takes_any_keyword = false;
};

/// Cuts at separators that are in no brackets and in no quotes.
std::vector<std::string_view> split(std::string_view text, std::string_view separator) {
  std::vector<std::string_view> parts;
  size_t begin = 0;
  int32_t depth = 0;
  char quote = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quote != 0) {
      if (c == quote) quote = 0;
    } else if (c == '\'' || c == '"') {
      quote = c;
    } else if (c == '(' || c == '[' || c == '{') {
      ++depth;
    } else if (c == ')' || c == ']' || c == '}') {
      --depth;
    } else if (depth == 0 && text.substr(i).starts_with(separator)) {
      parts.push_back(text.substr(begin, i - begin));
      begin = i + separator.size();
      i = begin - 1;
    }
  }
  parts.push_back(text.substr(begin));
  return parts;
}

/// "(self: Plan, x: int = 3, *, y: str) -> None", as pybind11 writes it.
Signature parse_signature(std::string_view line) {
  Signature signature;
  const size_t begin = line.find('(') + 1;
  const size_t arrow = line.rfind(") -> "), end = arrow == std::string_view::npos ? line.rfind(')') : arrow;
  bool keyword_only = false;
  for (const std::string_view part : split(line.substr(begin, end - begin), ", ")) {
    if (part.starts_with("**")) {
      signature.takes_any_keyword = true;
    } else if (part.starts_with("*")) {
      keyword_only = true;
    } else if (!part.empty() && part != "/") {
      const size_t colon = part.find(": ");
      const std::vector<std::string_view> type = split(part.substr(std::min(colon + 2, part.size())), " = ");
      signature.parameters.push_back({.name = std::string(part.substr(0, colon)),
                                      .type = std::string(type.front()),
                                      .has_default = type.size() > 1,
                                      .keyword_only = keyword_only});
    }
  }
  return signature;
}

/// The class that a type's text names; null where it cannot be found.
py::object class_named(std::string_view name) {
  try {
    const size_t dot = name.rfind('.');
    const std::string module(dot == std::string_view::npos ? "builtins" : name.substr(0, dot));
    return py::module_::import(module.c_str()).attr(py::str(std::string(name.substr(dot + 1))));
  } catch (const py::error_already_set&) {
    return {};
  }
}

/// Whether a parameter of this type takes the object, as far as that can be told from the type's text.
bool fits(py::handle object, std::string_view type) {
  return std::ranges::any_of(split(type, " | "), [&](std::string_view one) {
    if (one == "None") return object.is_none();
    if (one == "typing.SupportsInt" || one == "typing.SupportsIndex") return PyIndex_Check(object.ptr()) != 0;
    if (one == "typing.SupportsFloat") return PyBool_Check(object.ptr()) || as_number(object).has_value();
    const size_t bracket = one.find('[');
    const py::object outer = class_named(one.substr(0, bracket));
    if (!outer || !py::isinstance<py::type>(outer)) return true;
    if (!py::isinstance(object, outer)) return false;
    if (!one.starts_with("collections.abc.Sequence[")) return true;
    const std::string_view item_type = one.substr(bracket + 1, one.size() - bracket - 2);
    return std::ranges::all_of(py::reinterpret_borrow<py::sequence>(object),
                               [&](py::handle item) { return fits(item, item_type); });
  });
}

/// A type's text in the words of messages.
std::string in_words(std::string type) {
  constexpr std::pair<std::string_view, std::string_view> kWords[] = {
      {"typing.SupportsInt | typing.SupportsIndex", "an integer"},
      {"typing.SupportsFloat | typing.SupportsIndex", "a number"},
      {"typing.SupportsIndex", "an integer"},
      {"typing.SupportsInt", "an integer"},  // pybind11 3.0, as torch 2.11 has it, says these alone
      {"typing.SupportsFloat", "a number"},
  };
  for (const auto& [name, words] : kWords) {
    for (size_t at = type.find(name); at != std::string::npos; at = type.find(name))
      type.replace(at, name.size(), words);
  }
  return type;
}

/// As Python has it: "'a'", "'a' and 'b'", "'a', 'b', and 'c'".
std::string listed(const std::vector<std::string>& names) {
  std::string all;
  for (size_t i = 0; i < names.size(); ++i)
    all += text(i == 0 ? "" : i + 1 < names.size() ? ", " : i == 1 ? " and " : ", and ", '\'', names[i], '\'');
  return all;
}

/// Why a call does not fit one signature.
struct Misfit {
  size_t num_unexpected = 0, num_missing = 0;
  std::string message;
  bool is_of_type = false;
};

Misfit misfit(const std::string& name, const Signature& signature, const Call& call) {
  std::vector<py::handle> values(signature.parameters.size());
  const auto may_be_positional = [](const Parameter& p) { return !p.keyword_only; };
  const auto num_positional =
      static_cast<size_t>(std::ranges::count_if(signature.parameters, may_be_positional));  // they come first
  const size_t num_taken = std::min(call.positional.size(), num_positional);
  std::copy_n(call.positional.begin(), num_taken, values.begin());
  Misfit found;
  found.num_unexpected = call.positional.size() - num_taken;
  if (found.num_unexpected > 0) {
    const bool has_self = num_positional > 0 && signature.parameters[0].name == "self";
    const size_t max = num_positional - has_self, given = call.positional.size() - has_self;
    found.message = text(name, "() takes at most ", max, " positional argument", max == 1 ? "" : "s", " but ", given,
                         given == 1 ? " was" : " were", " given");
  }
  for (const auto& [keyword, value] : call.keywords) {
    const auto parameter = std::ranges::find(signature.parameters, keyword, &Parameter::name);
    const bool is_known = parameter != signature.parameters.end();
    if (!is_known && signature.takes_any_keyword) continue;
    if (is_known && !values[static_cast<size_t>(parameter - signature.parameters.begin())]) {
      values[static_cast<size_t>(parameter - signature.parameters.begin())] = value;
      continue;
    }
    ++found.num_unexpected;
    if (found.message.empty()) {
      found.message = text(name, "() got ", is_known ? "multiple values for" : "an unexpected keyword", " argument '",
                           keyword, '\'');
    }
  }
  std::vector<std::string> missing, missing_keywords;
  for (size_t i = 0; i < values.size(); ++i) {
    const Parameter& parameter = signature.parameters[i];
    if (!values[i] && !parameter.has_default)
      (parameter.keyword_only ? missing_keywords : missing).push_back(parameter.name);
  }
  found.num_missing = missing.size() + missing_keywords.size();
  for (const auto& [names, kind] : {std::pair(&missing, "positional"), {&missing_keywords, "keyword-only"}}) {
    if (names->empty() || !found.message.empty()) continue;
    found.message = text(name, "() missing ", names->size(), " required ", kind, " argument",
                         names->size() == 1 ? "" : "s", ": ", listed(*names));
  }
  if (!found.message.empty()) return found;

  found.is_of_type = true;
  std::string came, expected;
  for (size_t i = 0; i < values.size(); ++i) {
    const Parameter& parameter = signature.parameters[i];
    if (!values[i]) continue;
    if (!fits(values[i], parameter.type)) {
      found.message = text(parameter.name, ": got ", shown(values[i]), ", expected ", in_words(parameter.type));
      return found;
    }
    came += text(came.empty() ? "" : ", ", parameter.name, '=', shown(values[i]));
    expected += text(expected.empty() ? "" : ", ", parameter.name, ": ", in_words(parameter.type));
  }
  found.message = text(name, "(): got ", came, ", expected ", expected);
  return found;
}

/// Replaces pybind11's error, which is pending, where it is that a call fits no overload.
void explain(Call call) {
  py::error_already_set error;
  const std::string message = py::str(error.value());
  const size_t end_of_name = message.find("(): incompatible ");
  if (end_of_name == std::string::npos) return error.restore();
  std::string name = message.substr(0, end_of_name);
  const bool is_constructor = message.substr(end_of_name).starts_with("(): incompatible constructor");
  if (is_constructor) {
    if (!call.positional.empty()) name = type_of(call.positional.front());
    call.positional.erase(call.positional.begin(), call.positional.begin() + (call.positional.empty() ? 0 : 1));
  }

  std::optional<Misfit> closest;
  const std::string_view lines = std::string_view(message).substr(0, message.find("\n\nInvoked with: "));
  const std::vector<std::string_view> parts = split(lines, "\n    ");
  for (const std::string_view line : std::span(parts).subspan(1)) {  // "1. (x: int) -> None"
    const Signature signature = parse_signature(line);
    const bool is_method = !signature.parameters.empty() && signature.parameters.front().name == "self";
    const std::string& of = is_method ? signature.parameters.front().type : "";
    const std::string full_name = is_method ? text(of.substr(of.rfind('.') + 1), '.', name) : name;
    Misfit found = misfit(full_name, signature, call);
    const auto distance = [](const Misfit& m) { return std::pair(m.num_unexpected + m.num_missing, m.num_unexpected); };
    if (!closest || distance(found) < distance(*closest)) closest = std::move(found);
  }
  if (!closest) return error.restore();
  const py::object type = closest->is_of_type ? py::module_::import("knapformer._core").attr("ArgumentError")
                                              : py::reinterpret_borrow<py::object>(PyExc_TypeError);
  PyErr_SetString(type.ptr(), closest->message.c_str());
}

bool call_does_not_fit(const PyObject* result) {
  return result == nullptr && PyErr_ExceptionMatches(PyExc_TypeError) != 0;
}

// pybind11's function behind all functions of this module takes its arguments in one of two ways, by its version.
PyCFunctionWithKeywords call_with_tuple = nullptr;
using CallWithArray = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*);
CallWithArray call_with_array = nullptr;

PyObject* with_tuple(PyObject* self, PyObject* args, PyObject* kwargs) {
  PyObject* result = call_with_tuple(self, args, kwargs);
  if (call_does_not_fit(result)) {
    Call call;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i) call.positional.emplace_back(PyTuple_GET_ITEM(args, i));
    PyObject *key = nullptr, *value = nullptr;
    for (Py_ssize_t i = 0; kwargs != nullptr && PyDict_Next(kwargs, &i, &key, &value) != 0;)
      call.keywords.emplace_back(py::str(py::handle(key)), value);
    explain(std::move(call));
  }
  return result;
}

PyObject* with_array(PyObject* self, PyObject* const* args, Py_ssize_t num_positional, PyObject* names) {
  PyObject* result = call_with_array(self, args, num_positional, names);
  if (call_does_not_fit(result)) {
    Call call;
    for (Py_ssize_t i = 0; i < num_positional; ++i) call.positional.emplace_back(args[i]);
    for (Py_ssize_t i = 0; names != nullptr && i < PyTuple_GET_SIZE(names); ++i)
      call.keywords.emplace_back(py::str(py::handle(PyTuple_GET_ITEM(names, i))), args[num_positional + i]);
    explain(std::move(call));
  }
  return result;
}

template <class Function>
PyCFunction as_method(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

void visit(py::handle value, PyCFunction dispatcher) {
  if (PyCFunction_Check(value.ptr())) {
    PyMethodDef& method = *reinterpret_cast<PyCFunctionObject*>(value.ptr())->m_ml;
    if (method.ml_meth != dispatcher) return;
    method.ml_meth = (method.ml_flags & METH_FASTCALL) != 0 ? as_method(with_array) : as_method(with_tuple);
  } else if (PyInstanceMethod_Check(value.ptr())) {
    visit(PyInstanceMethod_GET_FUNCTION(value.ptr()), dispatcher);
  } else if (py::isinstance<py::staticmethod>(value)) {
    visit(value.attr("__func__"), dispatcher);
  } else if (py::isinstance(value, py::handle(reinterpret_cast<PyObject*>(&PyProperty_Type)))) {
    visit(value.attr("fget"), dispatcher);
    visit(value.attr("fset"), dispatcher);
  } else if (py::isinstance<py::type>(value)) {
    for (const auto& [name, member] : py::dict(value.attr("__dict__"))) visit(member, dispatcher);
  }
}

}  // namespace

void make_call_errors_readable(const py::module_& m) {
  const py::cpp_function any([] {});
  const PyCFunction dispatcher = reinterpret_cast<PyCFunctionObject*>(any.ptr())->m_ml->ml_meth;
  call_with_tuple = reinterpret_cast<PyCFunctionWithKeywords>(reinterpret_cast<void (*)()>(dispatcher));
  call_with_array = reinterpret_cast<CallWithArray>(reinterpret_cast<void (*)()>(dispatcher));
  for (const auto& [name, value] : py::dict(m.attr("__dict__"))) visit(value, dispatcher);
}

}  // namespace knapformer
