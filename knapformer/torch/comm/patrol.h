// The patrol: looks for errors of other ranks while an accelerator computes and no host waits.
//
// The host runs ahead of an accelerator. It notices a collective whose peers never come only where it waits for the
// device, in code that is not ours (loss.item()). So calls mark places in the device's work, and a thread asks now and
// then whether the device has passed the last one. If it has not passed it for a second, the thread looks for errors as
// a waiting call does (watchdog.h). If it finds one, and two seconds later the device has still not come by, it ends
// the collectives in flight: a host that waits for the device comes back, and the next call on the balancer raises.
//
// The host marks these places itself, and no lock is held while anything is asked of a device: if it hangs, what waits
// for room in its launch queue waits forever.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace knapformer {

class Patrol {
 public:
  /// Whether the device has done all work that it was given so far. Runs on the patrol's thread.
  using IsDone = std::function<bool()>;

  /// look: throws the errors of other ranks. abort: ends the collectives in flight, after look has thrown; never
  /// throws.
  Patrol(std::function<void()> look, std::function<void(const std::exception&)> abort,
         std::chrono::milliseconds interval = std::chrono::seconds(1));
  Patrol(const Patrol&) = delete;
  Patrol& operator=(const Patrol&) = delete;

  /// To be called after the device was given a collective. Where is_done throws, as after an error of the device, the
  /// patrol ends with a warning: the host hears of that error itself.
  void device_works(IsDone is_done);

 private:
  void run(const std::stop_token& stop);
  /// Whether it slept that long, and was not stopped.
  bool sleep(std::chrono::milliseconds time, const std::stop_token& stop);

  std::function<void()> look_;
  std::function<void(const std::exception&)> abort_;
  std::chrono::milliseconds interval_;
  std::mutex mutex_;
  std::condition_variable_any changed_;
  IsDone newest_;        // none: nothing was given to the device since the patrol took the last one
  std::jthread thread_;  // the last member: it ends first
};

}  // namespace knapformer
