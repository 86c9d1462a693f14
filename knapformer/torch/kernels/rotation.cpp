#include "knapformer/torch/kernels/rotation.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <string>

#include "knapformer/torch/kernels/cuda_kernel.h"
#include "knapformer/torch/kernels/item_of.h"
#include "knapformer/torch/kernels/rotation_kernel.h"

namespace knapformer {

extern const char kRotationSource[];  // the text of rotation_kernel.h

const KernelSource& rotation_source() {
  static const auto* const source = new KernelSource{"the rotation kernel", kRotationSource, {"knapformer_rotate"}};
  return *source;
}

namespace {

using rotation::Address;
using rotation::Rotation;

using Rotate = at::Tensor(const at::Tensor&, const at::Tensor&, bool);
using RotateRows = void(const at::Tensor&, const at::Tensor&, int64_t);

at::Tensor call_rotate(const at::Tensor& x, const at::Tensor& turns, bool back) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("knapformer::rotate", "").typed<Rotate>();
  return op.call(x, turns, back);
}

const c10::TypedOperatorHandle<RotateRows>& rotate_rows_op() {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("knapformer::rotate_rows", "").typed<RotateRows>();
  return op;
}

/// x, or a copy, in which each pair lies at a multiple of its size. first: where x begins, in elements.
at::Tensor with_aligned_pairs(const at::Tensor& x, int64_t first) {
  const bool aligned = x.stride(2) == 1 && (first | x.stride(0) | x.stride(1)) % 2 == 0;
  return aligned ? x : x.clone(at::MemoryFormat::Contiguous);
}

/// Rotates by operations that are differentiable themselves.
at::Tensor rotate_by_aten(const at::Tensor& x, const at::Tensor& turns, bool back) {
  const at::Tensor pairs = with_aligned_pairs(x, x.storage_offset()).to(turns.scalar_type()).unflatten(-1, {-1, 2});
  const at::Tensor turn = at::view_as_complex(turns.contiguous());
  return at::view_as_real(at::view_as_complex(pairs) * (back ? turn.conj() : turn)).flatten(-2).to(x.scalar_type());
}

Address address_of(const void* pointer) { return reinterpret_cast<Address>(pointer); }

void rotate_rows_cpu(const at::Tensor&, const at::Tensor& work, int64_t num_blocks) {
  const auto& rotation = *static_cast<const Rotation*>(work.const_data_ptr());
  for (int64_t t = 0; t < num_blocks * rotation::kThreads; ++t) rotation::run_thread(rotation, t);
}

void rotate_rows_cuda(const at::Tensor& out, const at::Tensor& work, int64_t num_blocks) {
  CudaKernel& kernel = CudaKernel::on(out.device(), rotation_source());
  Rotation rotation = *static_cast<const Rotation*>(work.const_data_ptr());
  const std::string error = kernel.launch(0, num_blocks, rotation::kThreads, &rotation);
  TORCH_CHECK(error.empty(), "the rotation kernel: ", error);
}

bool has_rotation_kernel(at::Device device) {
  if (device.is_cpu()) return false;  // ATen's operations use several threads and vectors there; its loop is for tests
  if (!rotate_rows_op().hasKernelForDispatchKey(c10::computeDispatchKey({}, {}, device))) return false;
  if (!device.is_cuda()) return true;
  const std::string& error = CudaKernel::on(device, rotation_source()).error();
  if (error.empty()) return true;
  TORCH_WARN_ONCE("knapformer: rotary embedding takes several operations in place of one kernel: ", error);
  return false;
}

}  // namespace

at::Tensor rotate_by_kernel(const at::Tensor& given, const at::Tensor& given_turns, bool back) {
  const auto first = static_cast<int64_t>(address_of(given.const_data_ptr())) / given.element_size();
  const at::Tensor x = with_aligned_pairs(given, first), turns = given_turns.contiguous();
  at::Tensor out = at::empty(x.sizes(), x.options());
  Rotation rotation{.from = address_of(x.const_data_ptr()),
                    .to = address_of(out.mutable_data_ptr()),
                    .turns = address_of(turns.const_data_ptr()),
                    .token_stride = x.stride(0) * x.element_size(),
                    .head_stride = x.stride(1) * x.element_size(),
                    .num_tokens = x.size(0),
                    .num_heads = static_cast<int>(x.size(1)),
                    .num_pairs = static_cast<int>(x.size(2) / 2),
                    .item = *kernels::item_of(x.scalar_type()),
                    .in_double = turns.scalar_type() == at::kDouble,
                    .back = back};
  if (out.numel() > 0) {
    rotate_rows_op().call(out, at::from_blob(&rotation, {sizeof(rotation)}, at::kByte), rotation.num_blocks());
  }
  return out;
}

namespace {

at::Tensor rotate_kernel(const at::Tensor& x, const at::Tensor& turns, bool back) {
  return (has_rotation_kernel(x.device()) ? rotate_by_kernel : rotate_by_aten)(x, turns, back);
}

class RotateFunction : public torch::autograd::Function<RotateFunction> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& turns,
                            bool back) {
    context->save_for_backward({turns});
    context->saved_data["back"] = back;
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call_rotate(x, turns, back);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const bool back = context->saved_data["back"].toBool();
    return {call_rotate(gradients[0], context->get_saved_variables()[0], !back), {}, {}};
  }
};

at::Tensor rotate_autograd(const at::Tensor& x, const at::Tensor& turns, bool back) {
  if (x._fw_grad(0).defined()) return rotate_by_aten(x, turns, back);
  if (x.requires_grad() && at::GradMode::is_enabled()) return RotateFunction::apply(x, turns, back);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return call_rotate(x, turns, back);
}

}  // namespace

at::Tensor rotate(const at::Tensor& x, const at::Tensor& turns, bool back) {
  TORCH_CHECK_VALUE(x.dim() == 3 && x.size(2) % 2 == 0 && kernels::item_of(x.scalar_type()) && !x.is_complex(),
                    "rotate: got x of shape ", x.sizes(), " and ", x.scalar_type(),
                    ", expected (tokens, heads, head_dim) of float32, float64, float16 or bfloat16, head_dim even");
  TORCH_CHECK_VALUE(
      turns.sizes() == at::IntArrayRef({x.size(0), 1, x.size(2) / 2, 2}) &&
          (turns.scalar_type() == at::kFloat || turns.scalar_type() == at::kDouble) && turns.device() == x.device(),
      "rotate: got turns of shape ", turns.sizes(), " and ", turns.scalar_type(), " on ", turns.device(), " for x of ",
      x.sizes(), " on ", x.device(), ", expected (tokens, 1, head_dim / 2, 2) of float32 or float64 there");
  TORCH_CHECK_VALUE(!turns.requires_grad(), "rotate: got turns that want a gradient, expected constants");
  // torch's function transforms (torch.func) do not support autograd functions of C++.
  if (c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode)) {
    return rotate_by_aten(x, turns, back);
  }
  return call_rotate(x, turns, back);
}

// Here, beside rotate(): whoever links it gets the registration with it, also from a static library.
TORCH_LIBRARY_FRAGMENT(knapformer, library) {
  library.def("rotate(Tensor x, Tensor turns, bool back) -> Tensor");
  library.impl("rotate", c10::DispatchKey::CompositeExplicitAutograd, &rotate_kernel);
  library.impl("rotate", c10::DispatchKey::Autograd, &rotate_autograd);

  library.def("rotate_rows(Tensor(a!) out, Tensor work, int num_blocks) -> ()");
  library.impl("rotate_rows", c10::DispatchKey::CPU, &rotate_rows_cpu);
  library.impl("rotate_rows", c10::DispatchKey::CUDA, &rotate_rows_cuda);
}

}  // namespace knapformer
