// Arguments as Python has them.
//
// They are converted here rather than by pybind11's casters, so that a wrong type is an error like any other: one line
// that names the argument, what came and what was expected. A balancer can tell such an error to other ranks.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "knapformer/core/model/cluster.h"
#include "knapformer/core/model/trained_model.h"
#include "knapformer/core/planners/planner.h"
#include "knapformer/core/util/error.h"

namespace knapformer {

/// What came, on one line: its repr, or its type where that is long.
std::string shown(pybind11::handle object);
std::string type_of(pybind11::handle object);
/// The first line of an error's message. Further lines, in messages of Python and torch, say where the error comes
/// from.
std::string first_line(const std::exception& error);

// These return nothing where the object is of another kind. A bool is no number here.
std::optional<int64_t> as_integer(pybind11::handle object);   // anything with __index__
std::optional<double> as_number(pybind11::handle object);     // anything with __float__ or __index__
std::optional<std::string> as_text(pybind11::handle object);  // without zero bytes
std::optional<Mask> as_mask(pybind11::handle object);         // a text; throws ArgumentError for one that is no mask's

/// `expected`: the words for the bounds.
template <class T = int64_t>
T integer_from(pybind11::handle object, std::string_view argument, T min = std::numeric_limits<T>::min(),
               T max = std::numeric_limits<T>::max(), std::string_view expected = {}) {
  const std::optional<int64_t> value = as_integer(object);
  if (value && *value >= min && *value <= max) return static_cast<T>(*value);
  const bool is_bounded = min > std::numeric_limits<T>::min() || max < std::numeric_limits<T>::max();
  throw_argument(argument, shown(object),
                 !expected.empty() ? std::string(expected)
                 : is_bounded      ? text("an integer from ", min, " to ", max)
                                   : text("an integer of ", 8 * sizeof(T), " bits"));
}
double number_from(pybind11::handle object, std::string_view argument);
std::string text_from(pybind11::handle object, std::string_view argument);
bool flag_from(pybind11::handle object, std::string_view argument);
/// An instance of a class of this module, or of one that it imports.
template <class T>
T& instance_from(pybind11::handle object, std::string_view argument, std::string_view expected) {
  if (!pybind11::isinstance<T>(object)) throw_argument(argument, shown(object), expected);
  return object.cast<T&>();
}
/// None stands for the default.
std::string solver_from(pybind11::handle object);
Mask mask_from(pybind11::handle mask);
/// d_model.
int64_t width_from(pybind11::handle object);
/// A name, a number of moves, or None for the default.
Effort effort_from(pybind11::handle object);
/// A Cluster or a name of one; None stands for the default.
Cluster cluster_from(pybind11::handle object);
/// None stands for the default.
TrainedModel model_from(pybind11::handle object);

/// The settings that all plans of a run share. cost: a knapformer.Cost, of which d_model, mask, sync and effort are
/// left to the caller.
PlanInput settings_from(pybind11::handle cost, pybind11::handle max_tokens_per_rank);

/// Adds read-only properties to a class: each with its name, what it says, and the member or function that gives it.
template <class... Options>
auto properties_of(pybind11::class_<Options...>& bound) {
  return [&bound](const char* name, const char* doc, auto get) {
    if constexpr (std::is_member_object_pointer_v<decltype(get)>) {
      bound.def_readonly(name, get, doc);
    } else {
      bound.def_property_readonly(name, get, doc);
    }
  };
}

/// The function for interrupt_check: throws what a signal raises. It acts on the main thread alone, to which Python
/// gives signals.
void check_signals();

/// Visits the items of an iterable. Text is no iterable here.
void for_each_item(pybind11::handle list, std::string_view argument, std::string_view expected,
                   const std::function<void(pybind11::handle)>& visit);

/// `convert`: one of the as_... above.
template <class T>
std::vector<T> list_from(pybind11::handle list, std::string_view argument, std::string_view expected,
                         std::string_view expected_item, std::optional<T> (*convert)(pybind11::handle)) {
  std::vector<T> items;
  for_each_item(list, argument, expected, [&](pybind11::handle item) {
    std::optional<T> converted = convert(item);
    if (!converted) throw_argument(text(argument, "[", items.size(), "]"), shown(item), expected_item);
    items.push_back(*std::move(converted));
  });
  return items;
}

inline std::vector<double> numbers_from(pybind11::handle list, std::string_view argument) {
  return list_from<double>(list, argument, "a list of numbers", "a number", as_number);
}

}  // namespace knapformer
