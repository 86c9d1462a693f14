// What streams other than the default one have been given and have not done.
//
// On the default stream everything is done when its launch returns. On another one, copies from the host that do not
// block, the packing kernel, barriers, and the end of memory that was taken there are late: they are done when
// something else is launched behind them on that stream, when another stream waits for an event behind them, or when
// the stream was given nothing for kPatience, as a device goes on while the host waits for others. So a missing wait
// shows as wrong numbers.
#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace simulated_device {

/// 0: the default stream.
inline thread_local c10::StreamId current_stream = 0;

class LateWork {
 public:
  static LateWork& instance();

  static constexpr std::chrono::milliseconds kPatience{200};

  /// Gives a stream something to do.
  void launch(c10::StreamId stream, std::function<void()> work);
  /// Does what the current stream was given, as something is launched behind it.
  void catch_up() { run(current_stream, num_launched(current_stream)); }

  int64_t num_launched(c10::StreamId stream);
  /// Does what the stream has not yet done of the first `count` that it was given.
  void run(c10::StreamId stream, int64_t count);
  /// Does what all streams were given.
  void run_all();
  /// With true, nothing is done for its age.
  void hold(bool held) { held_ = held; }

 private:
  struct Queue {
    std::mutex running;  // held by who does the work, one after another
    std::mutex mutex;    // of what follows
    std::deque<std::function<void()>> waiting;
    int64_t num_launched = 0, num_done = 0;
    std::chrono::steady_clock::time_point last_launch;
    std::exception_ptr error;  // of what was done for its age
  };
  Queue& queue_of(c10::StreamId stream);
  /// What each stream was given, where the last of it is older than this.
  std::vector<std::pair<c10::StreamId, int64_t>> older_than(std::chrono::milliseconds age);
  [[noreturn]] void run_what_is_old();

  std::mutex mutex_;
  std::map<c10::StreamId, std::unique_ptr<Queue>> queues_;
  std::atomic<bool> held_ = false;
};

}  // namespace simulated_device
