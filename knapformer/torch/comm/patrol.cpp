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

void Patrol::device_works(IsDone is_done) {
  {
    const std::lock_guard lock(mutex_);
    newest_.swap(is_done);  // the one before is freed without the lock
  }
  changed_.notify_one();
}

bool Patrol::sleep(std::chrono::milliseconds time, const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, stop, time, [] { return false; });
  return !stop.stop_requested();
}

void Patrol::run(const std::stop_token& stop) {
  const RelaxedCapture relaxed;
  try {
    IsDone is_done;  // none: the device has passed the last mark
    while (true) {
      if (!is_done) {
        std::unique_lock lock(mutex_);
        if (!changed_.wait(lock, stop, [&] { return newest_ != nullptr; })) return;
        is_done.swap(newest_);
      }
      if (!sleep(interval_, stop)) return;
      if (is_done()) {
        is_done = nullptr;
        continue;
      }
      try {
        look_();
      } catch (const std::exception& error) {
        if (!sleep(2 * interval_, stop)) return;
        if (is_done()) continue;
        abort_(error);
        return;
      }
    }
  } catch (const std::exception& error) {  // as after an error of the device, which the host's next call of it raises
    TORCH_WARN("knapformer: no longer looks for errors of other ranks while the device works: ", error.what());
  }
}

}  // namespace knapformer
