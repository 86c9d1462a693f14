// The patrol over a device whose progress the test sets.
#include "knapformer/torch/comm/patrol.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <memory>
#include <semaphore>
#include <stdexcept>
#include <string>

#include "knapformer/core/util/process.h"

namespace knapformer {
namespace {

using std::chrono::milliseconds;

/// Work that the device is given and does, as counts.
struct Device {
  std::atomic<int> given = 0, done = 0;

  Patrol::IsDone mark() {
    return [this, until = given.load()] { return done >= until; };
  }
};

struct Watch {
  Device device;
  std::atomic<int> num_looks = 0, num_aborts = 0;
  std::atomic<bool> others_failed = false;
  std::string seen;
  std::function<void()> during_look = [] {};
  Patrol patrol{[this] {
                  during_look();
                  ++num_looks;
                  if (others_failed) throw std::runtime_error("rank 1: no");
                },
                [this](const std::exception& error) {
                  seen = error.what();
                  ++num_aborts;
                },
                milliseconds(2)};

  void give() {
    ++device.given;
    patrol.device_works(device.mark());
  }
  /// Whether it came to that, in a time that no machine needs.
  template <class Condition>
  bool comes(Condition condition) {
    const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!condition()) {
      if (std::chrono::steady_clock::now() > give_up) return false;
      std::this_thread::sleep_for(milliseconds(1));
    }
    return true;
  }
};

TEST(Patrol, EndsWhereTheDeviceFails) {
  Watch watch;
  std::atomic<bool> failed = false;
  watch.patrol.device_works([&]() -> bool {
    failed = true;
    throw std::runtime_error("CUDA error: an illegal memory access was encountered");
  });
  EXPECT_TRUE(watch.comes([&] { return failed.load(); }));
  watch.give();
  std::this_thread::sleep_for(milliseconds(50));  // in which a patrol that goes on would look many times
  EXPECT_EQ(watch.num_looks, 0);
  EXPECT_EQ(watch.num_aborts, 0);
}

TEST(Patrol, ADeviceThatIsSlowToAnswerKeepsNoHost) {
  Watch watch;
  std::binary_semaphore asked{0}, answers{0};
  watch.patrol.device_works([&] {
    asked.release();
    answers.acquire();
    return true;
  });
  asked.acquire();
  watch.give();  // would never return if the patrol asked with its lock held
  answers.release();
  EXPECT_TRUE(watch.comes([&] { return watch.num_looks > 0; }));
}

TEST(Patrol, AHostThatComesByItselfKeepsItsGroups) {
  Watch watch;
  watch.others_failed = true;
  watch.during_look = [&] { watch.device.done = watch.device.given.load(); };
  for (int looks = 1; looks <= 2; ++looks) {  // so the first error was no reason to end
    watch.give();
    EXPECT_TRUE(watch.comes([&] { return watch.num_looks == looks; }));
  }
  std::this_thread::sleep_for(milliseconds(50));  // longer than it waits before it ends anything
  EXPECT_EQ(watch.num_aborts, 0);
}

TEST(Patrol, LooksWhileTheDeviceWorksAndEndsItsWorkOnceAnErrorIsSeen) {
  Watch watch;
  watch.give();
  EXPECT_TRUE(watch.comes([&] { return watch.num_looks > 3; }));
  EXPECT_EQ(watch.num_aborts, 0);
  watch.others_failed = true;
  EXPECT_TRUE(watch.comes([&] { return watch.num_aborts == 1; }));
  EXPECT_EQ(watch.seen, "rank 1: no");
  watch.give();
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_EQ(watch.num_aborts, 1);
}

TEST(Patrol, LooksNoMoreWhenTheDeviceHasComeBy) {
  Watch watch;
  watch.give();
  EXPECT_TRUE(watch.comes([&] { return watch.num_looks > 0; }));
  watch.device.done = 1;
  watch.others_failed = true;  // after the device's work: a call on the balancer finds it
  int before = -1;
  EXPECT_TRUE(watch.comes([&] {
    const int looks = watch.num_looks;
    std::this_thread::sleep_for(milliseconds(50));
    return std::exchange(before, looks) == watch.num_looks;
  }));
}

TEST(Patrol, WorkGivenDuringALookIsNotForgotten) {
  Watch watch;
  watch.give();
  EXPECT_TRUE(watch.comes([&] { return watch.num_looks > 0; }));
  watch.give();
  watch.device.done = 1;  // the first; the second hangs
  const int looks = watch.num_looks;
  EXPECT_TRUE(watch.comes([&] { return watch.num_looks > looks + 2; }));
  watch.others_failed = true;
  EXPECT_TRUE(watch.comes([&] { return watch.num_aborts == 1; }));
}

TEST(Patrol, AForkedProcessLetsGoOfItWithoutAWait) {
  std::shared_ptr<Patrol> patrol = owned_by_this_process(std::make_unique<Patrol>([] {}, [](const std::exception&) {}));
  const pid_t forked = ::fork();
  if (forked == 0) {
    ::alarm(60);  // ends a process that waits
    patrol = nullptr;
    ::_exit(0);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(forked, &status, 0), forked);
  EXPECT_TRUE(WIFEXITED(status));
}

}  // namespace
}  // namespace knapformer
