// The patrol: looks for errors of other ranks while an accelerator computes and no host waits.
//
// The host runs ahead of an accelerator: a collective whose peers never come shows at the host only where it waits for
// the device, in code that is not ours (loss.item()). So a thread marks a place in the device's work, now and then asks
// whether the device has come by, and looks as a waiting call does (watchdog.h) where it has not for a second. What it
// sees ends the collectives in flight: a host that waits for the device comes back, and the next call on the balancer
// raises.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace knapformer {

class Patrol {
 public:
  /// Whether the device has done what it was given until the mark was made.
  using IsDone = std::function<bool()>;
  /// Marks the end of what the device was given so far. On the patrol's thread.
  using Mark = std::function<IsDone()>;

  /// look: throws what other ranks have said. abort: ends the collectives in flight, after that; never throws.
  Patrol(std::function<void()> look, std::function<void(const std::exception&)> abort,
         std::chrono::milliseconds interval = std::chrono::seconds(1));
  Patrol(const Patrol&) = delete;
  Patrol& operator=(const Patrol&) = delete;

  /// The device was given a collective.
  void device_works(Mark mark);

 private:
  void run(const std::stop_token& stop);

  std::function<void()> look_;
  std::function<void(const std::exception&)> abort_;
  std::chrono::milliseconds interval_;
  std::mutex mutex_;
  std::condition_variable_any changed_;
  Mark mark_;            // none: nothing new since the last mark was made
  std::jthread thread_;  // the last member: it ends first
};

}  // namespace knapformer
