// Torch's `privateuse1` device, simulated: allocator, guard, hooks and kernels.
//
// Every operation of torch runs on the CPU at once, on copies (torch's CPU fallback); views are made here, since the
// fallback copies and would break aliasing. Collectives run late, as on a stream of their own (collectives.cpp).
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/op_registration/adaption.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <cstring>

#include "counters.h"
#include "memory.h"

namespace simulated_device {
namespace {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kNumDevices = 2;
thread_local c10::DeviceIndex current_device = 0;
thread_local c10::StreamId current_stream = 0;

class Allocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override { return allocate_on(num_bytes, current_device); }
  c10::DataPtr allocate_on(size_t num_bytes, c10::DeviceIndex index) {
    const c10::Device device(kType, index);
    if (num_bytes == 0) return {nullptr, nullptr, &release, device};
    void* address = DeviceMemory::instance().allocate(num_bytes);
    return {address, address, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t count) const override {
    DeviceMemory& memory = DeviceMemory::instance();
    std::memcpy(memory.for_kernels(to), memory.for_kernels(from), count);
  }

 private:
  static void release(void* address) {
    if (address != nullptr) DeviceMemory::instance().free(address);
  }
};

Allocator allocator;
REGISTER_ALLOCATOR(kType, &allocator)

using Event = std::chrono::steady_clock::time_point;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kType;
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kType, current_device}; }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, current_stream);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<c10::StreamId> num_made = 0;
    return c10::Stream(c10::Stream::UNSAFE, device, ++num_made);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return c10::Stream(c10::Stream::UNSAFE, stream.device(), std::exchange(current_stream, stream.id()));
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kNumDevices; }
  // All work is done when its call returns.
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    *static_cast<Event*>(*event) = std::chrono::steady_clock::now();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeEvent(void*) const override { Counters::instance().add_sync("synchronizeEvent"); }
  double elapsedTime(void* begin, void* end, c10::DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(*static_cast<Event*>(end) - *static_cast<Event*>(begin)).count();
  }
  void synchronizeStream(const c10::Stream&) const override { Counters::instance().add_sync("synchronizeStream"); }
  void synchronizeDevice(c10::DeviceIndex) const override { Counters::instance().add_sync("synchronizeDevice"); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kNumDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current_device = index; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return std::exchange(current_device, index);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &PinnedMemory::instance(); }
  bool isPinnedPtr(const void* address) const override { return PinnedMemory::instance().owns(address); }
  c10::Device getDeviceFromPtr(void*) const override { return {kType, current_device}; }
};
Hooks hooks;
[[maybe_unused]] const bool hooks_registered = [] {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

/// While a kernel of torch runs, which copies its tensors: these copies are not counted as the program's.
thread_local bool inside_kernel = false;

c10::DeviceIndex index_of(std::optional<c10::Device> device) {
  return device && device->index() >= 0 ? device->index() : current_device;
}

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const Guard guard;
  const c10::Device before = guard.exchangeDevice({kType, index_of(device)});
  at::Tensor made = at::detail::empty_generic(sizes, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                              dtype.value_or(at::kFloat), format);
  guard.setDevice(before);
  return made;
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const Guard guard;
  const c10::Device before = guard.exchangeDevice({kType, index_of(device)});
  at::Tensor made = at::detail::empty_strided_generic(
      sizes, strides, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype.value_or(at::kFloat));
  guard.setDevice(before);
  return made;
}

/// A CPU tensor of the same values in the same memory, for kernels.
at::Tensor as_cpu(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  const auto num_items = static_cast<int64_t>(tensor.storage().nbytes() / tensor.itemsize());
  void* memory = num_items == 0 ? nullptr : DeviceMemory::instance().for_kernels(tensor.storage().data());
  at::Tensor view = at::from_blob(memory, {num_items}, tensor.options().device(at::kCPU))
                        .as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) view = view.conj();
  return tensor.is_neg() ? view._neg_view() : view;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (from.numel() > 0 && !inside_kernel) {
    Counters& counters = Counters::instance();
    if (!from.is_cpu() && !to.is_cpu()) {
      counters.add_launch("copy");
    } else {
      const bool to_device = from.is_cpu();
      const bool pinned = PinnedMemory::instance().owns((to_device ? from : to).storage().data());
      if (to_device) ++counters.copies_to_device;
      if (!non_blocking || (!pinned && !to_device)) {
        counters.add_sync(to_device ? "copy to the device" : "copy from the device");
      } else if (!pinned) {
        counters.add_pageable_copy("copy to the device");
      }
    }
  }
  as_cpu(to).copy_(as_cpu(from));
  return to;
}

at::Tensor view_of(const at::Tensor& self, at::ScalarType dtype, at::IntArrayRef sizes, at::IntArrayRef strides,
                   int64_t offset) {
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(self.storage()),
                                                             self.key_set(), c10::scalarTypeToTypeMeta(dtype));
  view.unsafeGetTensorImpl()->set_storage_offset(offset);
  view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return view;
}

at::Tensor strided_view(const at::Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides,
                        std::optional<int64_t> offset) {
  return view_of(self, self.scalar_type(), sizes, strides, offset.value_or(self.storage_offset()));
}

at::Tensor view(const at::Tensor& self, at::IntArrayRef sizes) {
  const at::DimVector inferred = at::infer_size_dv(sizes, self.numel());
  const auto strides = at::detail::computeStride(self.sizes(), self.strides(), inferred);
  TORCH_CHECK(strides, "view: got size ", sizes, ", which the strides do not allow");
  return strided_view(self, inferred, *strides, self.storage_offset());
}

at::Tensor reshape_alias(const at::Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides) {
  return strided_view(self, sizes, strides, self.storage_offset());
}

at::Tensor view_as_real(const at::Tensor& self) {
  at::DimVector sizes(self.sizes().begin(), self.sizes().end()), strides;
  for (const int64_t stride : self.strides()) strides.push_back(2 * stride);
  sizes.push_back(2);
  strides.push_back(1);
  return view_of(self, c10::toRealValueType(self.scalar_type()), sizes, strides, 2 * self.storage_offset());
}

at::Tensor view_as_complex(const at::Tensor& self) {
  at::DimVector sizes(self.sizes().begin(), self.sizes().end() - 1), strides;
  for (int64_t dim = 0; dim + 1 < self.dim(); ++dim) strides.push_back(self.stride(dim) / 2);
  return view_of(self, c10::toComplexType(self.scalar_type()), sizes, strides, self.storage_offset() / 2);
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat>) {
  const size_t needed = (c10::multiply_integers(sizes) + self.storage_offset()) * self.itemsize();
  const c10::Storage& storage = self.storage();
  if (storage.nbytes() < needed) {
    c10::DataPtr larger = allocator.allocate_on(needed, self.device().index());
    if (storage.nbytes() > 0) allocator.copy_data(larger.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(larger));
    storage.set_nbytes(needed);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, /*non_blocking=*/false);
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Counters& counters = Counters::instance();
  const bool outermost = !std::exchange(inside_kernel, true);
  if (outermost) {
    const std::string& name = op.schema().name();
    // As on a GPU, filling an empty tensor launches nothing.
    const bool fills_nothing = name == "aten::zero_" && stack->back().toTensor().numel() == 0;
    if (!fills_nothing) counters.add_launch(name);
    // The host waits for these: what it does next depends on the result's values, or on how many there are.
    if (op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape)) counters.add_sync(name);
  }
  try {
    at::native::cpu_fallback(op, stack);
  } catch (...) {
    if (outermost) inside_kernel = false;
    throw;
  }
  if (outermost) inside_kernel = false;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("resize_", &resize);
  library.impl("as_strided", &strided_view);
  library.impl("view", &view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("view_as_real", &view_as_real);
  library.impl("view_as_complex", &view_as_complex);
}
// as_cpu resolves these bits. Torch's own kernels for them would copy, and so call this operation again without end.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace

}  // namespace simulated_device
