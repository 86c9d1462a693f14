// Long work asks here whether it is still wanted: Ctrl-C must end a search of minutes, and a wait for other ranks.
#pragma once

#include <atomic>
#include <cstdint>

namespace knapformer {

/// Throws if the work is not wanted any more. Python's modules set it to look for signals; unset, it does nothing.
inline std::atomic<void (*)()> interrupt_check{nullptr};

/// Called on any thread, every few milliseconds at most.
inline void check_interrupt() {
  if (void (*check)() = interrupt_check.load(std::memory_order_relaxed)) check();
}

/// Asks in a loop whose turns may be short: once in so much work that it takes milliseconds.
class InterruptChecks {
 public:
  /// work: of this turn, in steps of some nanoseconds.
  void count(int64_t work) {
    since_check_ += work;
    if (since_check_ < kWorkPerCheck) return;
    since_check_ = 0;
    check_interrupt();
  }

 private:
  static constexpr int64_t kWorkPerCheck = 1'000'000;
  int64_t since_check_ = 0;
};

}  // namespace knapformer
