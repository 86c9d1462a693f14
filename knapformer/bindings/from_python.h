// The parts of knapformer._torch, and the arguments of the balancer: like arguments.h, but with tensors, and errors are
// reported to the ranks that wait for this one. Conversion only.
//
// All files of the module include this one: what pybind11 converts must be the same in all of them.
#pragma once

#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <string_view>
#include <tuple>
#include <vector>

#include "knapformer/bindings/arguments.h"
#include "knapformer/core/model/mask.h"
#include "knapformer/torch/balancer.h"

using BalancerClass = pybind11::class_<knapformer::SequenceBalancer>;

void bind_planning_ahead(pybind11::module_& m);
void bind_planning(BalancerClass& balancer);  // lengths in, a plan out; what a step took, and its metrics
void bind_step(pybind11::module_& m);         // routing and attention, and what packed queries see

namespace knapformer {

at::Tensor tensor_from(pybind11::handle object, std::string_view argument);

/// A list of tensors, or None.
std::vector<at::Tensor> tensors_from(const pybind11::object& list, std::string_view argument);

/// A list (any iterable of integers) or an integer tensor.
std::vector<int64_t> lengths_from(const pybind11::object& seq_lens);

/// A list of names, or None.
std::vector<Mask> masks_from(const pybind11::object& names);

/// A list of numbers, or None.
std::vector<double> work_from(const pybind11::object& work);

/// Runs `convert` under the GIL, then `method` of a balancer or a step, with the tuple that `convert` returns, without
/// the GIL: other threads of this process run while ranks wait for each other. What `convert` throws is reported; the
/// method reports its own errors. An error that Python raised inside of torch, in a hook of saved tensors say, is
/// passed on as it is; TORCH_WARN becomes a warning of Python's.
template <class Self, class Convert, class Method>
auto convert_then_call(Self& self, Convert convert, Method method) {
  auto arguments = [&] {
    try {
      return convert();
    } catch (const Error& error) {
      self.report(error);
      throw;
    } catch (const std::exception& error) {
      self.report(StateError(first_line(error)));
      throw;
    }
  }();
  try {
    torch::PyWarningHandler warnings;
    try {
      const pybind11::gil_scoped_release release;
      return std::apply([&](auto&... given) { return std::invoke(method, self, given...); }, arguments);
    } catch (...) {
      warnings.set_in_exception();
      throw;
    }
  } catch (python_error& error) {
    error.restore();
    throw pybind11::error_already_set();
  }
}

template <class>
using Object = const pybind11::object&;

/// The same as a method for Python, each of whose arguments is converted by one of `convert`, in order.
template <class Self, class Method, class... Convert>
auto converting(Method method, Convert... convert) {
  return [=](Self& self, Object<Convert>... arguments) {
    return convert_then_call(
        self, [&] { return std::tuple<decltype(convert(arguments))...>{convert(arguments)...}; }, method);
  };
}

}  // namespace knapformer
