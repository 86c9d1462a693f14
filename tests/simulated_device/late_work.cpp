#include "late_work.h"

#include <thread>
#include <utility>

namespace simulated_device {

LateWork& LateWork::instance() {
  static LateWork& work = []() -> LateWork& {
    auto* const made = new LateWork;  // never destroyed, as its thread has no end
    std::thread([made] { made->run_what_is_old(); }).detach();
    return *made;
  }();
  return work;
}

LateWork::Queue& LateWork::queue_of(c10::StreamId stream) {
  const std::lock_guard lock(mutex_);
  std::unique_ptr<Queue>& queue = queues_[stream];
  if (queue == nullptr) queue = std::make_unique<Queue>();
  return *queue;
}

void LateWork::launch(c10::StreamId stream, std::function<void()> work) {
  if (stream == 0) return work();
  Queue& queue = queue_of(stream);
  const std::lock_guard lock(queue.mutex);
  queue.waiting.push_back(std::move(work));
  ++queue.num_launched;
  queue.last_launch = std::chrono::steady_clock::now();
}

int64_t LateWork::num_launched(c10::StreamId stream) {
  if (stream == 0) return 0;
  Queue& queue = queue_of(stream);
  const std::lock_guard lock(queue.mutex);
  return queue.num_launched;
}

void LateWork::run(c10::StreamId stream, int64_t count) {
  if (count == 0) return;
  Queue& queue = queue_of(stream);
  const std::lock_guard running(queue.running);
  while (true) {
    std::function<void()> next;
    {
      const std::lock_guard lock(queue.mutex);
      if (queue.error) std::rethrow_exception(queue.error);
      if (queue.num_done >= count) return;
      next = std::move(queue.waiting.front());
      queue.waiting.pop_front();
      ++queue.num_done;
    }
    next();
  }
}

std::vector<std::pair<c10::StreamId, int64_t>> LateWork::older_than(std::chrono::milliseconds age) {
  const std::lock_guard lock(mutex_);
  std::vector<std::pair<c10::StreamId, int64_t>> old;
  for (const auto& [stream, queue] : queues_) {
    const std::lock_guard of_queue(queue->mutex);
    const bool is_old = std::chrono::steady_clock::now() - queue->last_launch >= age;
    if (is_old && !queue->waiting.empty()) old.emplace_back(stream, queue->num_launched);
  }
  return old;
}

void LateWork::run_all() {
  for (const auto& [stream, count] : older_than(std::chrono::milliseconds(0))) run(stream, count);
}

void LateWork::run_what_is_old() {
  for (;; std::this_thread::sleep_for(kPatience / 4)) {
    if (held_) continue;
    for (const auto& [stream, count] : older_than(kPatience)) {
      try {
        run(stream, count);
      } catch (...) {
        Queue& queue = queue_of(stream);
        const std::lock_guard lock(queue.mutex);
        queue.error = std::current_exception();
      }
    }
  }
}

}  // namespace simulated_device
