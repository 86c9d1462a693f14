// What can be known of the packing kernel on CUDA without a GPU: that NVRTC, where it is found, compiles it for those
// there are.
#include "knapformer/torch/exchange/cuda_kernel.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "knapformer/core/util/error.h"
#include "knapformer/torch/exchange/copies.h"

namespace knapformer {
namespace {

size_t times(std::string_view text, std::string_view part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string_view::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

/// Nothing where NVRTC is not found.
std::optional<CompiledKernel> compiled(int architecture) {
  try {
    return compile_packing_kernel(architecture);
  } catch (const StateError& error) {
    if (std::string_view(error.what()).starts_with("NVRTC: no library")) return std::nullopt;
    throw;
  }
}

TEST(CudaKernel, CompilesForEveryArchitecture) {
  for (const int architecture : {80, 86, 89, 90, 100, 120}) {
    const auto machine_code = compiled(architecture);
    if (!machine_code) GTEST_SKIP() << "no NVRTC";
    ASSERT_GT(machine_code->image.size(), 4U);
    EXPECT_EQ(std::string_view(machine_code->image.data(), 4), "\177ELF");
    // A spilled register waits for the read that fills it, and so no other read is under way. Nor is a thread's array
    // in memory: that would be the stack frame.
    EXPECT_EQ(times(machine_code->log, "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"), 2U)
        << machine_code->log;
    const std::string_view image(machine_code->image.data(), machine_code->image.size());
    for (const char* name : {"knapformer_move_rows", "knapformer_move_rows_by_table"})
      EXPECT_NE(image.find(name), std::string_view::npos);
  }
}

TEST(CudaKernel, IsRefusedForAnArchitectureThatNvrtcDoesNotKnow) {
  try {
    if (!compiled(9999)) GTEST_SKIP() << "no NVRTC";
    FAIL();
  } catch (const StateError& error) {
    EXPECT_NE(std::string_view(error.what()).find("sm_9999"), std::string_view::npos) << error.what();
  }
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
