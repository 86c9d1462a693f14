// What a thread of ours may ask of a CUDA device while the program records a CUDA graph in another thread.
//
// A recording in mode "global", which is torch.cuda.graph's default, forbids calls such as cudaEventQuery and
// cudaMalloc to every thread of the process: they fail, and the recording is spoiled. A thread in mode "relaxed" is
// left alone, and what it asks of the device is not recorded.
#pragma once

namespace knapformer {

/// Holds the calling thread in mode "relaxed". Does nothing where CUDA's driver is not loaded.
class RelaxedCapture {
 public:
  RelaxedCapture();
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  void* driver_;
  int (*exchange_mode_)(int*) = nullptr;  // none: nothing to undo
  int before_;
};

}  // namespace knapformer
