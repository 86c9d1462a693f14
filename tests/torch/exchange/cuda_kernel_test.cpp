// What can be known of the packing kernel on CUDA without a GPU: that NVRTC, where it is found, compiles it for those
// there are.
#include "knapformer/torch/exchange/cuda_kernel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <string_view>

#include "knapformer/torch/exchange/packing_op.h"

namespace knapformer {
namespace {

size_t times(std::string_view text, std::string_view part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string_view::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST(CudaKernel, CompilesForEveryArchitecture) {
  for (const int architecture : {80, 86, 89, 90, 100, 120}) {
    const CompiledKernel machine_code = compile_packing_kernel(architecture);
    if (machine_code.error.starts_with("NVRTC: no library")) GTEST_SKIP() << machine_code.error;
    EXPECT_EQ(machine_code.error, "") << architecture;
    ASSERT_GT(machine_code.image.size(), 4U);
    EXPECT_EQ(std::string_view(machine_code.image.data(), 4), "\177ELF");
    // A spilled register waits for the read that fills it, and so no other read is under way.
    EXPECT_EQ(times(machine_code.log, "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"), 2U)
        << machine_code.log;
    const CompiledKernel ptx = compile_packing_kernel(architecture, /*ptx=*/true);
    const std::string_view text(ptx.image.data(), ptx.image.size());
    for (const char* name : {"knapformer_move_rows", "knapformer_move_rows_by_table"}) {
      EXPECT_NE(text.find(std::string(".entry ") + name + "("), std::string_view::npos) << ptx.error;
    }
    EXPECT_EQ(text.find(".local"), std::string_view::npos);  // no thread's array is in memory
  }
}

TEST(CudaKernel, IsPtxOfTheNewestKnownArchitectureForANewerGpu) {
  const CompiledKernel kernel = compile_packing_kernel(9999);
  if (kernel.error.starts_with("NVRTC: no library")) GTEST_SKIP() << kernel.error;
  EXPECT_EQ(kernel.error, "");
  EXPECT_NE(std::string_view(kernel.image.data(), kernel.image.size()).find(".target sm_"), std::string_view::npos);
}

TEST(CudaKernel, LooksForNvrtcBesideTorch) {
  EXPECT_TRUE(std::filesystem::exists(path_beside_torch("libtorch_cpu.so"))) << path_beside_torch("libtorch_cpu.so");
}

TEST(CudaKernel, IsTheEngineOfNoOtherDevice) {
  EXPECT_EQ(engine_for(at::kCPU), ExchangeEngine::kCpu);
  EXPECT_EQ(engine_for(at::kMeta), ExchangeEngine::kDevice);
}

}  // namespace
}  // namespace knapformer
