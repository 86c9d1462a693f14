#include "knapformer/torch/comm/patrol.h"

#include <c10/util/Exception.h>

#include <exception>
#include <utility>

#include "knapformer/torch/comm/relaxed_capture.h"

namespace knapformer {

Patrol::Patrol(std::function<void()> look, std::function<void(const std::exception&)> abort,
               std::chrono::milliseconds interval)
    : look_(std::move(look)),
      abort_(std::move(abort)),
      interval_(interval),
      thread_([this](const std::stop_token& stop) { run(stop); }) {}

void Patrol::device_works(Mark mark) {
  {
    const std::lock_guard lock(mutex_);
    mark_ = std::move(mark);
  }
  changed_.notify_one();
}

void Patrol::run(const std::stop_token& stop) {
  const RelaxedCapture relaxed;
  IsDone is_done;  // none: the device has passed the last mark
  while (true) {
    try {
      {
        std::unique_lock lock(mutex_);
        if (!is_done && !changed_.wait(lock, stop, [&] { return mark_ != nullptr; })) return;
        if (!is_done) is_done = std::exchange(mark_, nullptr)();
        if (changed_.wait_for(lock, stop, interval_, [] { return false; }) || stop.stop_requested()) return;
      }
      if (is_done()) {
        is_done = nullptr;
        continue;
      }
    } catch (const std::exception& error) {  // as after an error of the device, which the host's next call of it raises
      TORCH_WARN("knapformer: no longer looks for errors of other ranks while the device works: ", error.what());
      return;
    }
    try {
      look_();
    } catch (const std::exception& error) {
      abort_(error);
      return;
    }
  }
}

}  // namespace knapformer
