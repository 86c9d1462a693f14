#include "knapformer/torch/exchange/engine.h"

namespace knapformer {

bool uses_packing_kernel(const ExchangeCall& call) {
  return call.engine() == ExchangeEngine::kKernel && packing_kernel_adds(call);
}

std::unique_ptr<Engine> make_engine(ExchangeCall& call) {
  if (call.engine() == ExchangeEngine::kCpu) return make_cpu_engine(call);
  return uses_packing_kernel(call) ? make_kernel_engine(call) : make_device_engine(call);
}

}  // namespace knapformer
