#include "knapformer/torch/comm/relaxed_capture.h"

#include <dlfcn.h>

namespace knapformer {

// As in cuda.h: CU_STREAM_CAPTURE_MODE_RELAXED is 2, and results are 0 where all went well.
RelaxedCapture::RelaxedCapture() : driver_(dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD)), before_(2) {
  if (driver_ == nullptr) return;
  const auto exchange = reinterpret_cast<int (*)(int*)>(dlsym(driver_, "cuThreadExchangeStreamCaptureMode"));
  if (exchange != nullptr && exchange(&before_) == 0) exchange_mode_ = exchange;
}

RelaxedCapture::~RelaxedCapture() {
  if (exchange_mode_ != nullptr) exchange_mode_(&before_);
  if (driver_ != nullptr) dlclose(driver_);
}

}  // namespace knapformer
