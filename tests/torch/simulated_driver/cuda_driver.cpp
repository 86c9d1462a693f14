// Of CUDA's driver what tests ask of it: the mode of a thread. A library of its name, which tests load.
static thread_local int mode = 0;  // CU_STREAM_CAPTURE_MODE_GLOBAL

extern "C" __attribute__((visibility("default"))) int cuThreadExchangeStreamCaptureMode(int* other) {
  if (*other < 0 || *other > 2) return 1;  // CUDA_ERROR_INVALID_VALUE
  const int before = mode;
  mode = *other;
  *other = before;
  return 0;
}

extern "C" __attribute__((visibility("default"))) int simulated_capture_mode() { return mode; }
