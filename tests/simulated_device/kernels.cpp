// Runs knapformer's packing kernel on the simulated device, thread by thread, on the mapping of its memory for kernels.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <cstring>
#include <vector>

#include "counters.h"
#include "knapformer/torch/exchange/packing_kernel.h"
#include "memory.h"

namespace simulated_device {
namespace {

namespace packing = knapformer::packing;

void to_kernel_memory(packing::Address& address) {
  if (address == 0) return;
  const DeviceMemory& memory = DeviceMemory::instance();
  const auto* pointer = reinterpret_cast<const void*>(address);
  TORCH_CHECK(memory.owns(pointer), "simulated device: a kernel was given an address of the host");
  address = reinterpret_cast<packing::Address>(memory.for_kernels(pointer));
}

void run_move_rows(const at::Tensor& given, int64_t num_tiles) {
  std::vector<packing::Work> memory(given.nbytes() / sizeof(packing::Work) + 1);
  packing::Work& work = memory[0];
  const void* bytes = given.const_data_ptr();
  std::memcpy(memory.data(), given.is_cpu() ? bytes : DeviceMemory::instance().for_kernels(bytes), given.nbytes());
  for (packing::Copy* copy = work.copies; copy < work.copies + work.num_copies; ++copy) {
    for (auto* address : {&copy->from, &copy->to, &copy->from_index, &copy->to_index}) to_kernel_memory(*address);
  }
  for (int tile = 0; tile < num_tiles; ++tile) {
    for (int thread = 0; thread < packing::kThreads; ++thread) packing::run_thread(work, tile, thread);
  }
}

void move_rows(const at::Tensor&, const at::Tensor& work, int64_t num_tiles, int64_t num_bytes) {
  Counters& counters = Counters::instance();
  TORCH_CHECK(!counters.fails_to_pack, "simulated device: out of memory");
  counters.add_launch("knapformer::move_rows");
  counters.packed_bytes += num_bytes;
  run_move_rows(work, num_tiles);
}

TORCH_LIBRARY_IMPL(knapformer, PrivateUse1, library) { library.impl("move_rows", &move_rows); }

}  // namespace
}  // namespace simulated_device
