// Arguments as Python has them.
//
// They are converted here rather than by pybind11's casters, so that a wrong type is an error like any other: named,
// and told to the ranks that wait for this one.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "knapformer/bindings/torch_bindings.h"
#include "knapformer/core/error.h"
#include "knapformer/core/mask.h"

namespace knapformer {

std::string type_of(pybind11::handle object);

at::Tensor tensor_from(pybind11::handle object, std::string_view argument);

/// A list of tensors, or None.
std::vector<at::Tensor> tensors_from(const pybind11::object& list, std::string_view argument);

/// A list (any iterable of integers) or an integer tensor.
std::vector<int64_t> lengths_from(const pybind11::object& seq_lens);

std::vector<Mask> masks_from(const std::optional<std::vector<std::string>>& names);

int64_t width_from(const pybind11::object& d_model);

/// `convert` under the GIL, then `call` with its result and without it: others of this process run while ranks wait for
/// each other. What convert throws is reported: `call` reports itself.
template <class Convert, class Call>
auto convert_then_call(SequenceBalancer& self, Convert convert, Call call) {
  auto arguments = [&] {
    try {
      return convert();
    } catch (const Error& error) {
      self.report(error);
      throw;
    }
  }();
  const pybind11::gil_scoped_release release;
  return call(arguments);
}

}  // namespace knapformer
