#include "late_work.h"

#include <utility>

namespace simulated_device {

LateWork& LateWork::instance() {
  static auto* const work = new LateWork;  // never destroyed: tensors may outlive static objects
  return *work;
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
      if (queue.num_done >= count) return;
      next = std::move(queue.waiting.front());
      queue.waiting.pop_front();
      ++queue.num_done;
    }
    next();
  }
}

void LateWork::run_all() {
  std::map<c10::StreamId, int64_t> given;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [stream, queue] : queues_) {
      const std::lock_guard of_queue(queue->mutex);
      given[stream] = queue->num_launched;
    }
  }
  for (const auto& [stream, count] : given) run(stream, count);
}

}  // namespace simulated_device
