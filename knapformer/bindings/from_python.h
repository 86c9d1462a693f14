// Arguments of the balancer: arguments.h, with tensors, and with other ranks that wait for this one.
#pragma once

#include <torch/csrc/Exceptions.h>

#include <string_view>
#include <tuple>
#include <vector>

#include "knapformer/bindings/arguments.h"
#include "knapformer/bindings/torch_bindings.h"
#include "knapformer/core/model/mask.h"

namespace knapformer {

using GivenTensor = Given<"torch.Tensor">;
using GivenTensors = Given<"collections.abc.Sequence[torch.Tensor] | None">;
using GivenLengths = Given<"collections.abc.Iterable[typing.SupportsIndex] | torch.Tensor">;
using GivenMasks = Given<"collections.abc.Iterable[str] | None">;
using GivenWork = Given<"collections.abc.Iterable[typing.SupportsFloat | typing.SupportsIndex] | None">;

at::Tensor tensor_from(pybind11::handle object, std::string_view argument);

/// A list of tensors, or None.
std::vector<at::Tensor> tensors_from(const pybind11::object& list, std::string_view argument);

/// A list (any iterable of integers) or an integer tensor.
std::vector<int64_t> lengths_from(const pybind11::object& seq_lens);

/// A list of names, or None.
std::vector<Mask> masks_from(const pybind11::object& names);

/// A list of numbers, or None.
std::vector<double> work_from(const pybind11::object& work);

/// `convert` under the GIL; what it throws is handed to `report` first, whatever it is.
template <class Convert, class Report>
auto convert_or_report(Convert convert, Report report) {
  try {
    return convert();
  } catch (const Error& error) {
    report(error);
    throw;
  } catch (const std::exception& error) {
    report(StateError(first_line(error)));
    throw;
  }
}

/// `convert` under the GIL, then `call` with the tuple that it returns and without it: others of this process run while
/// ranks wait for each other. What convert throws is reported: `call` reports itself. What Python raised inside of
/// torch, in a hook of saved tensors say, goes on as it is.
template <class Convert, class Call>
auto convert_then_call(SequenceBalancer& self, Convert convert, Call call) {
  auto arguments = convert_or_report(convert, [&](const std::exception& error) { self.report(error); });
  try {
    const pybind11::gil_scoped_release release;
    return std::apply(call, arguments);
  } catch (python_error& error) {
    error.restore();
    throw pybind11::error_already_set();
  }
}

}  // namespace knapformer
