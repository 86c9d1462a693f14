#include "knapformer/torch/exchange/cuda_kernel.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>

#include "knapformer/core/util/error.h"
#include "knapformer/torch/exchange/packing_kernel.h"

namespace knapformer {

extern const char kPackingSource[];  // the text of packing_kernel.h

std::string path_beside_torch(std::string_view name) {
  Dl_info of_c10{};
  if (dladdr(reinterpret_cast<const void*>(&c10::GetCPUAllocator), &of_c10) == 0 || of_c10.dli_fname == nullptr) {
    return std::string(name);
  }
  return (std::filesystem::path(of_c10.dli_fname).parent_path() / name).string();
}

namespace {

/// A shared library, whose functions are called by name.
class Library {
 public:
  /// The first that opens. `what` and `expected` say in messages what it is, and which were tried.
  Library(const char* what, const char* expected, std::initializer_list<const char*> names)
      : what_(what), expected_(expected) {
    for (const char* name : names) {
      if (handle_ == nullptr && name != nullptr) handle_ = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    }
  }

  bool has(const std::string& name) const { return handle_ != nullptr && dlsym(handle_, name.c_str()) != nullptr; }

  /// Arguments have the types of nvrtc.h and cuda.h, where handles are pointers. Throws StateError where there is no
  /// such function, and where its result says that it failed.
  template <class... Arguments>
  void call(const std::string& name, Arguments... arguments) const {
    if (handle_ == nullptr) throw StateError(text(what_, ": no library ", expected_));
    void* const found = dlsym(handle_, name.c_str());  // also in the libraries that this one links to
    if (found == nullptr) throw StateError(text(what_, " has no function ", name));
    const int result = reinterpret_cast<int (*)(Arguments...)>(found)(arguments...);
    if (result != 0) throw StateError(text(what_, ": result ", result, " of ", name));
  }

 private:
  const char *what_, *expected_;
  void* handle_ = nullptr;  // until the process ends
};

const Library& nvrtc() {
  // libcaffe2_nvrtc is torch's own library, and knows where torch's wheels have NVRTC. Its bare name is found where the
  // calling module has torch's folder in its search path.
  static const Library library("NVRTC",
                               "libcaffe2_nvrtc.so, libnvrtc.so.13 or libnvrtc.so.12 (KNAPFORMER_NVRTC names another)",
                               {std::getenv("KNAPFORMER_NVRTC"), path_beside_torch("libcaffe2_nvrtc.so").c_str(),
                                "libcaffe2_nvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"});
  return library;
}

const Library& driver() {
  static const Library library("CUDA's driver", "libcuda.so.1", {"libcuda.so.1"});
  return library;
}

/// CUDA's runtime makes a device's primary context current in a thread at that thread's first call of the runtime,
/// which may not have come yet.
void enter_primary_context(int device) {
  void* context = nullptr;
  driver().call("cuCtxGetCurrent", &context);
  if (context != nullptr) return;
  driver().call("cuDevicePrimaryCtxRetain", &context, device);
  driver().call("cuCtxSetCurrent", context);
}

}  // namespace

CompiledKernel compile_packing_kernel(int architecture) {
  void* program = nullptr;
  const char* const* no_headers = nullptr;
  nvrtc().call("nvrtcCreateProgram", &program, &kPackingSource[0], "packing_kernel.h", 0, no_headers, no_headers);
  const auto get = [&](const std::string& what) {
    size_t size = 0;
    nvrtc().call("nvrtcGet" + what + "Size", program, &size);
    std::vector<char> bytes(size);
    nvrtc().call("nvrtcGet" + what, program, bytes.data());
    return bytes;
  };
  const std::string target = text("--gpu-architecture=sm_", architecture);
  const std::array options{target.c_str(), "--std=c++20", "--ptxas-options=-v"};  // -v: the log lists registers
  std::string failed;
  try {
    nvrtc().call("nvrtcCompileProgram", program, static_cast<int>(options.size()), options.data());
  } catch (const StateError& error) {
    failed = error.what();
  }
  const std::vector<char> log = get("ProgramLog");
  CompiledKernel kernel{.image = failed.empty() ? get("CUBIN") : std::vector<char>(),
                        .log = std::string(log.begin(), log.end())};
  nvrtc().call("nvrtcDestroyProgram", &program);
  if (!failed.empty()) throw StateError(text(failed, " for ", target, ": ", kernel.log));
  return kernel;
}

CudaKernel& CudaKernel::on(at::Device device) {
  static std::mutex mutex;
  // Tensors may outlive static objects.
  static auto* const kernels = new std::map<c10::DeviceIndex, std::unique_ptr<CudaKernel>>;
  const c10::DeviceGuard guard(device);
  const c10::Device exact = c10::impl::VirtualGuardImpl(device.type()).getDevice();
  const std::lock_guard lock(mutex);
  std::unique_ptr<CudaKernel>& kernel = (*kernels)[exact.index()];
  if (kernel == nullptr) kernel.reset(new CudaKernel(exact));
  return *kernel;
}

const std::string& CudaKernel::error() {
  std::call_once(loaded_, [&] {
    try {
      load();
    } catch (const StateError& error) {
      error_ = text(error.what(), ", for ", device_);
    }
  });
  return error_;
}

void CudaKernel::load() {
  constexpr int kMajor = 75, kMinor = 76;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
  const c10::DeviceGuard guard(device_);
  int device = 0, major = 0, minor = 0;
  driver().call("cuInit", 0U);
  driver().call("cuDeviceGet", &device, static_cast<int>(device_.index()));
  driver().call("cuDeviceGetAttribute", &major, kMajor, device);
  driver().call("cuDeviceGetAttribute", &minor, kMinor, device);
  enter_primary_context(device);
  const CompiledKernel compiled = compile_packing_kernel(10 * major + minor);
  void* module = nullptr;  // until the process ends
  driver().call("cuModuleLoadData", &module, static_cast<const void*>(compiled.image.data()));
  for (const auto& [function, name] :
       {std::pair(&by_argument_, "knapformer_move_rows"), std::pair(&by_table_, "knapformer_move_rows_by_table")}) {
    driver().call("cuModuleGetFunction", function, module, name);
    // Otherwise its first launch may load it, and wait for the device. From 12.4 on.
    if (driver().has("cuFuncLoad")) driver().call("cuFuncLoad", *function);
  }
}

void CudaKernel::launch(const at::Tensor& work, int64_t num_tiles) {
  if (const std::string& why = error(); !why.empty()) throw StateError("the packing kernel: " + why);
  const c10::DeviceGuard guard(device_);
  enter_primary_context(device_.index());
  void* const stream = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_).native_handle();
  void* bytes = work.mutable_data_ptr();
  void* arguments[] = {work.is_cpu() ? bytes : &bytes};
  void** no_extra = nullptr;
  driver().call("cuLaunchKernel", work.is_cpu() ? by_argument_ : by_table_, static_cast<unsigned>(num_tiles), 1U, 1U,
                static_cast<unsigned>(packing::kThreads), 1U, 1U, /*shared bytes=*/0U, stream, &arguments[0], no_extra);
}

}  // namespace knapformer
