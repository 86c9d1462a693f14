// Long work asks here whether it is still wanted: Ctrl-C must end a search of minutes, and a wait for other ranks.
#pragma once

#include <atomic>

namespace knapformer {

/// Throws if the work is not wanted any more. Python's modules set it to look for signals; unset, it does nothing.
inline std::atomic<void (*)()> interrupt_check{nullptr};

/// Called on any thread, every few milliseconds at most.
inline void check_interrupt() {
  if (void (*check)() = interrupt_check.load(std::memory_order_relaxed)) check();
}

}  // namespace knapformer
