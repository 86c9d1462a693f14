// CUDA's recording of graphs, as a driver shows it that only keeps each thread's mode.
#include "knapformer/torch/comm/relaxed_capture.h"

#include <gtest/gtest.h>

#include <future>
#include <optional>

#include "knapformer/torch/task_thread.h"
#include "tests/torch/simulated_driver/loaded_driver.h"

namespace knapformer {
namespace {

constexpr int kGlobal = 0, kRelaxed = 2;

class Capture : public ::testing::Test {
 protected:
  void SetUp() override {
    if (LoadedDriver::has_real_one()) GTEST_SKIP() << "CUDA's driver is loaded";
    driver_.emplace();
  }

  std::optional<LoadedDriver> driver_;
};

TEST_F(Capture, AThreadIsRelaxedForAsLongAsItIsHeld) {
  EXPECT_EQ(driver_->mode(), kGlobal);
  {
    const RelaxedCapture outer;
    EXPECT_EQ(driver_->mode(), kRelaxed);
    std::async(std::launch::async, [&] { EXPECT_EQ(driver_->mode(), kGlobal); }).wait();
    { const RelaxedCapture inner; }
    EXPECT_EQ(driver_->mode(), kRelaxed);
  }
  EXPECT_EQ(driver_->mode(), kGlobal);
}

TEST_F(Capture, NothingHappensWithoutADriver) {
  driver_.reset();
  ASSERT_FALSE(LoadedDriver::has_real_one());
  const RelaxedCapture held;
  driver_.emplace();
  EXPECT_EQ(driver_->mode(), kGlobal);
}

TEST_F(Capture, TasksAreRelaxedUntilWhatTheyHoldIsFreed) {
  std::promise<int> in_work, at_release;
  // A tensor's memory is asked for in the work, and given back with what the work holds.
  std::shared_ptr<void> tensor(nullptr, [&](void*) { at_release.set_value(driver_->mode()); });
  const auto thread = TaskThread::make();
  const TaskThread::Task task = TaskThread::start(
      thread, [&, tensor = std::move(tensor)](const std::stop_token&) { in_work.set_value(driver_->mode()); });
  EXPECT_EQ(in_work.get_future().get(), kRelaxed);
  EXPECT_EQ(at_release.get_future().get(), kRelaxed);
}

}  // namespace
}  // namespace knapformer
