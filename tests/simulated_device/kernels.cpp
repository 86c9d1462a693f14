// Runs knapformer's packing kernel on the simulated device, thread by thread, on the mapping of its memory for kernels.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <cstring>
#include <vector>

#include "counters.h"
#include "knapformer/torch/exchange/packing_kernel.h"
#include "late_work.h"
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

void run_move_rows(const at::Tensor& work, int64_t num_tiles) {
  std::vector<packing::Source> aligned(work.nbytes() / sizeof(packing::Source) + 1);
  auto* bytes = reinterpret_cast<unsigned char*>(aligned.data());
  const void* given = work.const_data_ptr();
  std::memcpy(bytes, work.is_cpu() ? given : DeviceMemory::instance().for_kernels(given), work.nbytes());
  const auto& header = *reinterpret_cast<const packing::Work*>(bytes);
  auto* copies = reinterpret_cast<packing::Copy*>(bytes + packing::Work::kCopiesAt);
  auto* sums = reinterpret_cast<packing::Sum*>(bytes + header.sums_at());
  auto* sources = reinterpret_cast<packing::Source*>(bytes + header.sources_at());
  for (int i = 0; i < header.num_copies; ++i) {
    for (auto* address : {&copies[i].from, &copies[i].to, &copies[i].from_index, &copies[i].to_index}) {
      to_kernel_memory(*address);
    }
  }
  for (int i = 0; i < header.num_sums; ++i) {
    for (auto* address : {&sums[i].to, &sums[i].places}) to_kernel_memory(*address);
  }
  for (int i = 0; i < header.num_sources; ++i) {
    for (auto* address : {&sources[i].from, &sources[i].from_index}) to_kernel_memory(*address);
  }
  for (int tile = 0; tile < num_tiles; ++tile) {
    for (int thread = 0; thread < packing::kThreads; ++thread) packing::run_thread(bytes, tile, thread);
  }
}

void move_rows(const at::Tensor&, const at::Tensor& work, int64_t num_tiles, int64_t num_bytes) {
  Counters& counters = Counters::instance();
  TORCH_CHECK(!counters.fails_to_pack, "simulated device: out of memory");
  counters.add_launch("knapformer::move_rows");
  counters.packed_bytes += num_bytes;
  LateWork::instance().launch(current_stream, [=] { run_move_rows(work, num_tiles); });
}

TORCH_LIBRARY_IMPL(knapformer, PrivateUse1, library) { library.impl("move_rows", &move_rows); }

}  // namespace
}  // namespace simulated_device
