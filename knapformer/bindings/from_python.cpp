#include "knapformer/bindings/from_python.h"

#include <torch/csrc/autograd/python_variable.h>

namespace py = pybind11;

namespace knapformer {
namespace {

constexpr const char* kLengths = "a list or 1-dimensional tensor of integers";

std::vector<int64_t> lengths_of(const at::Tensor& tensor) {
  if (tensor.dim() == 1 && tensor.numel() == 0 && !tensor.is_meta()) return {};  // torch makes floats of an empty list
  if (tensor.dim() != 1 || !at::isIntegralType(tensor.scalar_type(), /*includeBool=*/false)) {
    throw_argument("seq_lens", text("a tensor of shape ", tensor.sizes(), " and dtype ", tensor.scalar_type()),
                   kLengths);
  }
  if (tensor.layout() != at::kStrided) {
    throw_argument("seq_lens", text("a tensor of layout ", tensor.layout()), "a dense tensor");
  }
  if (tensor.is_meta()) throw_argument("seq_lens", "a tensor on meta", "one that has values");
  const at::Tensor host = tensor.to(at::kCPU, at::kLong).contiguous();
  std::vector<int64_t> lens(host.const_data_ptr<int64_t>(), host.const_data_ptr<int64_t>() + host.numel());
  for (size_t i = 0; i < lens.size() && tensor.scalar_type() == at::kUInt64; ++i) {
    if (lens[i] < 0) {
      throw_argument(text("seq_lens[", i, "]"), static_cast<uint64_t>(lens[i]), "an integer below 2^63");
    }
  }
  return lens;
}

}  // namespace

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
  if (!THPVariable_Check(seq_lens.ptr())) {
    return list_from<int64_t>(seq_lens, "seq_lens", kLengths, "an integer", as_integer);
  }
  try {
    return lengths_of(THPVariable_Unpack(seq_lens.ptr()));
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {  // a tensor whose values cannot be had
    throw_argument("seq_lens", text("a tensor that raises ", first_line(error)), kLengths);
  }
}

std::vector<double> work_from(const py::object& work) {
  return work.is_none() ? std::vector<double>() : numbers_from(work, "work");
}

std::vector<Mask> masks_from(const py::object& names) {
  std::vector<Mask> masks;
  if (names.is_none()) return masks;
  for (const std::string& name : list_from<std::string>(
           names, "masks", "a list of masks, one for each sequence, or None", "the text of a mask", as_text)) {
    masks.push_back(Mask::parse(name));
  }
  return masks;
}

}  // namespace knapformer
