#include "knapformer/bindings/from_python.h"

#include <torch/csrc/autograd/python_variable.h>

namespace py = pybind11;

namespace knapformer {

at::Tensor tensor_from(py::handle object, std::string_view argument) {
  if (!THPVariable_Check(object.ptr())) throw_argument(argument, type_of(object), "a tensor");
  return THPVariable_Unpack(object.ptr());
}

std::vector<at::Tensor> tensors_from(const py::object& list, std::string_view argument) {
  std::vector<at::Tensor> tensors;
  if (list.is_none()) return tensors;
  if (THPVariable_Check(list.ptr()) || !py::isinstance<py::sequence>(list)) {
    throw_argument(argument, type_of(list), "a list of tensors, or None");
  }
  for_each_item(list, argument, "a list of tensors, or None", [&](py::handle item) {
    tensors.push_back(tensor_from(item, text(argument, "[", tensors.size(), "]")));
  });
  return tensors;
}

std::vector<int64_t> lengths_from(const py::object& seq_lens) {
  constexpr const char* kExpected = "a list or 1-dimensional tensor of integers";
  py::object list = seq_lens;
  if (THPVariable_Check(seq_lens.ptr())) {
    try {
      list = seq_lens.attr("tolist")();
    } catch (const py::error_already_set& error) {  // one without values
      throw_argument("seq_lens", text("a tensor that raises ", first_line(error)), kExpected);
    }
  }
  return list_from<int64_t>(list, "seq_lens", kExpected, "an integer", as_integer);
}

std::vector<double> work_from(const py::object& work) {
  return work.is_none() ? std::vector<double>() : numbers_from(work, "work");
}

std::vector<Mask> masks_from(const py::object& names) {
  if (names.is_none()) return {};
  return list_from<Mask>(names, "masks", "a list of masks, one for each sequence, or None", "the text of a mask",
                         as_mask);
}

}  // namespace knapformer
