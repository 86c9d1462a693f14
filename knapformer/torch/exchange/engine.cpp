#include "knapformer/torch/exchange/engine.h"

namespace knapformer {

std::unique_ptr<Engine> make_engine(ExchangeCall& call) {
  if (call.engine() == ExchangeEngine::kCpu) return make_cpu_engine(call);
  const bool by_kernel = call.engine() == ExchangeEngine::kKernel && packing_kernel_adds(call);
  return by_kernel ? make_kernel_engine(call) : make_device_engine(call);
}

}  // namespace knapformer
