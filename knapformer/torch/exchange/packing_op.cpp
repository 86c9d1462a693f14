#include "knapformer/torch/exchange/packing_op.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <cstring>
#include <string>

#include "knapformer/core/util/error.h"
#include "knapformer/torch/exchange/cuda_kernel.h"
#include "knapformer/torch/exchange/packing_kernel.h"

namespace knapformer {

namespace {

using MoveRows = void(const at::Tensor&, const at::Tensor&, int64_t, int64_t);

const c10::TypedOperatorHandle<MoveRows>& move_rows_op() {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("knapformer::move_rows", "").typed<MoveRows>();
  return op;
}

void move_rows_cpu(const at::Tensor&, const at::Tensor& work, int64_t num_tiles, int64_t) {
  const auto* bytes = static_cast<const unsigned char*>(work.const_data_ptr());
  for (int tile = 0; tile < num_tiles; ++tile) {
    for (int thread = 0; thread < packing::kThreads; ++thread) packing::run_thread(bytes, tile, thread);
  }
}

void move_rows_cuda(const at::Tensor& wire, const at::Tensor& work, int64_t num_tiles, int64_t) {
  CudaKernel& kernel = CudaKernel::on(wire.device());
  std::string error;
  if (work.is_cpu()) {
    struct alignas(16) {
      unsigned char bytes[packing::kMaxArgumentBytes];
    } argument;
    std::memcpy(argument.bytes, work.const_data_ptr(), work.nbytes());
    error = kernel.launch(/*by_table=*/false, num_tiles, &argument);
  } else {
    const void* argument = work.const_data_ptr();
    error = kernel.launch(/*by_table=*/true, num_tiles, &argument);
  }
  if (!error.empty()) throw StateError("the packing kernel: " + error);
}

}  // namespace

ExchangeEngine engine_for(at::Device device) {
  if (device.is_cpu()) return ExchangeEngine::kCpu;
  if (!move_rows_op().hasKernelForDispatchKey(c10::computeDispatchKey({}, {}, device))) return ExchangeEngine::kDevice;
  if (!device.is_cuda()) return ExchangeEngine::kKernel;
  const std::string& error = CudaKernel::on(device).error();
  if (error.empty()) return ExchangeEngine::kKernel;
  TORCH_WARN_ONCE("knapformer: exchanges are packed by several operations in place of one kernel: ", error);
  return ExchangeEngine::kDevice;
}

void move_rows(const at::Tensor& wire, const at::Tensor& work, int64_t num_tiles, int64_t num_bytes) {
  move_rows_op().call(wire, work, num_tiles, num_bytes);
}

// A fragment, as exchange.cpp defines the library.
TORCH_LIBRARY_FRAGMENT(knapformer, library) {
  library.def("move_rows(Tensor(a!) wire, Tensor work, int num_tiles, int num_bytes) -> ()");
  library.impl("move_rows", c10::DispatchKey::CPU, &move_rows_cpu);
  library.impl("move_rows", c10::DispatchKey::CUDA, &move_rows_cuda);
}

}  // namespace knapformer
