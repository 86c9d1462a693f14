// What streams other than the default one have been given and have not done.
//
// On the default stream everything is done when its launch returns. On another one, copies from the host that do not
// block, the packing kernel, and the end of memory that was taken there are late: they are done when something else is
// launched behind them on that stream, or when another stream waits for an event behind them. So a missing wait shows
// as wrong numbers.
#pragma once

#include <c10/core/Stream.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>

namespace simulated_device {

/// 0: the default stream.
inline thread_local c10::StreamId current_stream = 0;

class LateWork {
 public:
  static LateWork& instance();

  /// Gives a stream something to do.
  void launch(c10::StreamId stream, std::function<void()> work);
  /// Does what the current stream was given, as something is launched behind it.
  void catch_up() { run(current_stream, num_launched(current_stream)); }

  int64_t num_launched(c10::StreamId stream);
  /// Does what the stream has not yet done of the first `count` that it was given.
  void run(c10::StreamId stream, int64_t count);
  /// Does what all streams were given.
  void run_all();

 private:
  struct Queue {
    std::mutex running;  // held by who does the work, one after another
    std::mutex mutex;    // of what follows
    std::deque<std::function<void()>> waiting;
    int64_t num_launched = 0, num_done = 0;
  };
  Queue& queue_of(c10::StreamId stream);

  std::mutex mutex_;
  std::map<c10::StreamId, std::unique_ptr<Queue>> queues_;
};

}  // namespace simulated_device
