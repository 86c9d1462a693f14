#include "knapformer/bindings/from_python.h"

#include <torch/csrc/autograd/python_variable.h>

namespace py = pybind11;

namespace knapformer {

std::string type_of(py::handle object) { return py::str(py::type::handle_of(object).attr("__name__")); }

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
  for (const py::handle item : list) tensors.push_back(tensor_from(item, text(argument, "[", tensors.size(), "]")));
  return tensors;
}

std::vector<int64_t> lengths_from(const py::object& seq_lens) {
  if (THPVariable_Check(seq_lens.ptr())) {
    const at::Tensor& tensor = THPVariable_Unpack(seq_lens.ptr());
    if (tensor.dim() != 1 || !at::isIntegralType(tensor.scalar_type(), /*includeBool=*/false)) {
      throw_argument("seq_lens", text("a tensor of shape ", tensor.sizes(), " and dtype ", tensor.scalar_type()),
                     "a list or 1-dimensional tensor of integers");
    }
    const at::Tensor host = tensor.to(at::kCPU, at::kLong).contiguous();
    return {host.const_data_ptr<int64_t>(), host.const_data_ptr<int64_t>() + host.numel()};
  }
  try {
    std::vector<int64_t> lens;
    for (const py::handle item : py::iter(seq_lens)) {
      const auto index = py::reinterpret_steal<py::object>(PyNumber_Index(item.ptr()));
      if (!index) throw py::error_already_set();
      lens.push_back(index.cast<int64_t>());
    }
    return lens;
  } catch (const py::error_already_set&) {
  } catch (const py::cast_error&) {
  }
  throw_argument("seq_lens", std::string(py::repr(seq_lens)), "a list or 1-dimensional tensor of integers");
}

std::vector<Mask> masks_from(const std::optional<std::vector<std::string>>& names) {
  std::vector<Mask> masks;
  if (names) {
    for (const std::string& name : *names) masks.push_back(Mask::parse(name));
  }
  return masks;
}

int64_t width_from(const py::object& d_model) {
  if (!py::isinstance<py::int_>(d_model)) throw_argument("d_model", type_of(d_model), "an integer");
  return d_model.cast<int64_t>();
}

}  // namespace knapformer
