#include "knapformer/torch/tensor_checks.h"

#include "knapformer/core/util/error.h"

namespace knapformer {

void check_rows(const at::Tensor& tensor, std::string_view argument, int64_t num_rows, std::string_view rows,
                int64_t min_dims) {
  if (!tensor.defined()) throw_argument(argument, "no tensor", "a tensor");
  if (tensor.is_quantized()) throw_argument(argument, "a quantized tensor", "one that is not");
  if (tensor.layout() != at::kStrided) {
    throw_argument(argument, text("a tensor of layout ", tensor.layout()), "a dense tensor");
  }
  if (tensor.dim() < min_dims) {
    throw_argument(argument, text("a tensor of shape ", tensor.sizes()), text("at least ", min_dims, " dimensions"));
  }
  if (tensor.size(0) != num_rows) {
    throw_argument(argument, text(tensor.size(0), " rows (shape ", tensor.sizes(), ")"),
                   text(num_rows, " rows, one for each ", rows));
  }
}

void check_device(const at::Tensor& tensor, std::string_view argument, const at::Tensor& as, std::string_view as_name) {
  if (tensor.device() != as.device())
    throw_argument(argument, tensor.device(), text(as.device(), ", the device of ", as_name));
}

void check_has_memory(const at::Tensor& tensor, std::string_view argument) {
  if (tensor.is_meta()) throw_argument(argument, "a tensor on meta", "one on a device that has its values");
}

}  // namespace knapformer
