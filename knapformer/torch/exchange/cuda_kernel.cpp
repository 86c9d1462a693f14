#include "knapformer/torch/exchange/cuda_kernel.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/StringUtil.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <utility>

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

/// A shared library, and functions of it by name.
class Library {
 public:
  /// The first that opens. `what` and `expected` say in messages what it is, and which were tried.
  Library(std::string what, const std::string& expected, std::initializer_list<const char*> names)
      : what_(std::move(what)) {
    for (const char* name : names) {
      if (name != nullptr && (handle_ = dlopen(name, RTLD_NOW | RTLD_LOCAL)) != nullptr) return;
    }
    error_ = what_ + ": no library " + expected;
  }

  /// Finds a function, also in the libraries that this one links to.
  template <class Function>
  void find(const char* name, Function*& function) {
    find_if_known(name, function);
    if (function == nullptr && error_.empty()) error_ = what_ + " has no function " + name;
  }
  /// Null where this version of the library has none of that name.
  template <class Function>
  void find_if_known(const char* name, Function*& function) {
    if (handle_ != nullptr) function = reinterpret_cast<Function*>(dlsym(handle_, name));
  }
  /// What was not found first; empty: all was.
  const std::string& error() const { return error_; }

 private:
  void* handle_ = nullptr;  // until the process ends
  std::string what_, error_;
};

// As in nvrtc.h and cuda.h: handles are pointers, results are 0 where all went well.
using Program = void*;

struct Nvrtc {
  static const Nvrtc& get() {
    static const Nvrtc nvrtc;
    return nvrtc;
  }

  int (*create)(Program*, const char* source, const char* name, int, const char* const*, const char* const*) = nullptr;
  int (*destroy)(Program*) = nullptr;
  int (*compile)(Program, int num_options, const char* const* options) = nullptr;
  int (*log_size)(Program, size_t*) = nullptr;
  int (*log)(Program, char*) = nullptr;
  int (*cubin_size)(Program, size_t*) = nullptr;
  int (*cubin)(Program, char*) = nullptr;
  int (*ptx_size)(Program, size_t*) = nullptr;
  int (*ptx)(Program, char*) = nullptr;
  int (*num_architectures)(int*) = nullptr;
  int (*architectures)(int*) = nullptr;
  std::string error;

 private:
  Nvrtc() {
    // libcaffe2_nvrtc is torch's own library, and knows where torch's wheels have NVRTC. Its bare name is found where
    // the calling module has torch's folder in its search path.
    const std::string of_torch = path_beside_torch("libcaffe2_nvrtc.so");
    Library library("NVRTC", "libcaffe2_nvrtc.so, libnvrtc.so.13 or libnvrtc.so.12 (KNAPFORMER_NVRTC names another)",
                    {std::getenv("KNAPFORMER_NVRTC"), of_torch.c_str(), "libcaffe2_nvrtc.so", "libnvrtc.so.13",
                     "libnvrtc.so.12", "libnvrtc.so"});
    library.find("nvrtcCreateProgram", create);
    library.find("nvrtcDestroyProgram", destroy);
    library.find("nvrtcCompileProgram", compile);
    library.find("nvrtcGetProgramLogSize", log_size);
    library.find("nvrtcGetProgramLog", log);
    library.find("nvrtcGetCUBINSize", cubin_size);
    library.find("nvrtcGetCUBIN", cubin);
    library.find("nvrtcGetPTXSize", ptx_size);
    library.find("nvrtcGetPTX", ptx);
    library.find("nvrtcGetNumSupportedArchs", num_architectures);
    library.find("nvrtcGetSupportedArchs", architectures);
    error = library.error();
  }
};

struct Driver {
  static const Driver& get() {
    static const Driver driver;
    return driver;
  }

  int (*init)(unsigned flags) = nullptr;
  int (*device_get)(int*, int ordinal) = nullptr;
  int (*device_attribute)(int*, int attribute, int device) = nullptr;
  int (*current_context)(void**) = nullptr;
  int (*set_context)(void*) = nullptr;
  int (*retain_primary)(void**, int device) = nullptr;
  int (*load_module)(void**, const void* image) = nullptr;
  int (*get_function)(void**, void* module, const char* name) = nullptr;
  int (*load_function)(void* function) = nullptr;  // from 12.4 on
  int (*launch)(void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned shared_bytes,
                void* stream, void** arguments, void** extra) = nullptr;
  std::string error;

 private:
  Driver() {
    Library library("CUDA's driver", "libcuda.so.1", {"libcuda.so.1"});
    library.find("cuInit", init);
    library.find("cuDeviceGet", device_get);
    library.find("cuDeviceGetAttribute", device_attribute);
    library.find("cuCtxGetCurrent", current_context);
    library.find("cuCtxSetCurrent", set_context);
    library.find("cuDevicePrimaryCtxRetain", retain_primary);
    library.find("cuModuleLoadData", load_module);
    library.find("cuModuleGetFunction", get_function);
    library.find_if_known("cuFuncLoad", load_function);
    library.find("cuLaunchKernel", launch);
    error = library.error();
  }
};

/// CUDA's runtime makes a device's primary context current in a thread at that thread's first call of the runtime,
/// which may not have come yet.
int enter_primary_context(const Driver& driver, int device) {
  void* context = nullptr;
  if (const int result = driver.current_context(&context); result != 0 || context != nullptr) return result;
  if (const int result = driver.retain_primary(&context, device); result != 0) return result;
  return driver.set_context(context);
}

}  // namespace

CompiledKernel compile_packing_kernel(int architecture, bool ptx) {
  const Nvrtc& nvrtc = Nvrtc::get();
  CompiledKernel kernel{.image = {}, .log = {}, .error = nvrtc.error};
  if (!kernel.error.empty()) return kernel;
  int count = 0;
  nvrtc.num_architectures(&count);
  std::vector<int> known(static_cast<size_t>(count));
  nvrtc.architectures(known.data());
  if (std::ranges::find(known, architecture) == known.end()) {
    const int wanted = architecture;
    ptx = true;
    architecture = 0;
    for (const int each : known) {
      if (each < wanted) architecture = std::max(architecture, each);
    }
  }

  Program program = nullptr;
  const std::string target = c10::str("--gpu-architecture=", ptx ? "compute_" : "sm_", architecture);
  const std::array options{target.c_str(), "--std=c++20", "--ptxas-options=-v"};  // -v: the log lists registers
  int result = nvrtc.create(&program, kPackingSource, "packing_kernel.h", 0, nullptr, nullptr);
  if (result == 0) result = nvrtc.compile(program, static_cast<int>(options.size()), options.data());
  size_t size = 0;
  if (program != nullptr && nvrtc.log_size(program, &size) == 0 && size > 1) {
    kernel.log.resize(size);
    nvrtc.log(program, kernel.log.data());
  }
  if (result == 0) result = (ptx ? nvrtc.ptx_size : nvrtc.cubin_size)(program, &size);
  if (result == 0) {
    kernel.image.resize(size);
    result = (ptx ? nvrtc.ptx : nvrtc.cubin)(program, kernel.image.data());
  }
  if (result != 0) {
    kernel.image.clear();
    kernel.error = c10::str("NVRTC: result ", result, " for ", target, ": ", kernel.log);
  }
  if (program != nullptr) nvrtc.destroy(&program);
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
  std::call_once(loaded_, [&] { load(); });
  return error_;
}

void CudaKernel::load() {
  const Driver& driver = Driver::get();
  if (!(error_ = driver.error).empty()) return;
  constexpr int kMajor = 75, kMinor = 76;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
  const c10::DeviceGuard guard(device_);
  int device = 0, major = 0, minor = 0;
  int result = driver.init(0);
  if (result == 0) result = driver.device_get(&device, device_.index());
  if (result == 0) result = driver.device_attribute(&major, kMajor, device);
  if (result == 0) result = driver.device_attribute(&minor, kMinor, device);
  if (result == 0) result = enter_primary_context(driver, device);
  if (result != 0) {
    error_ = c10::str("CUDA's driver: result ", result, " for ", device_);
    return;
  }
  const CompiledKernel compiled = compile_packing_kernel(10 * major + minor);
  if (!(error_ = compiled.error).empty()) return;
  void* module = nullptr;  // until the process ends
  result = driver.load_module(&module, compiled.image.data());
  const auto find = [&](void*& function, const char* name) {
    if (result == 0) result = driver.get_function(&function, module, name);
    // Otherwise its first launch may load it, and wait for the device.
    if (result == 0 && driver.load_function != nullptr) result = driver.load_function(function);
  };
  find(by_argument_, "knapformer_move_rows");
  find(by_table_, "knapformer_move_rows_by_table");
  if (result != 0) error_ = c10::str("CUDA's driver: result ", result, " for the packing kernel on ", device_);
}

std::string CudaKernel::launch(bool by_table, int64_t num_tiles, void* argument) {
  if (const std::string& why = error(); !why.empty()) return why;
  const Driver& driver = Driver::get();
  const c10::DeviceGuard guard(device_);
  int result = enter_primary_context(driver, device_.index());
  void* const stream = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_).native_handle();
  void* arguments[] = {argument};
  if (result == 0) {
    result = driver.launch(by_table ? by_table_ : by_argument_, static_cast<unsigned>(num_tiles), 1, 1,
                           packing::kThreads, 1, 1, 0, stream, arguments, nullptr);
  }
  return result == 0 ? "" : c10::str("CUDA's driver gave ", result, " at a launch on ", device_);
}

}  // namespace knapformer
