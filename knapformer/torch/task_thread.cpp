#include "knapformer/torch/task_thread.h"

#include <algorithm>
#include <utility>

namespace knapformer {

struct TaskThread::Task::Place {
  Work work;
  std::stop_source stop = {};
  bool runs = false;
};

TaskThread::Task& TaskThread::Task::operator=(Task&& other) noexcept {
  drop();
  thread_ = std::move(other.thread_);
  place_ = std::move(other.place_);
  return *this;
}

void TaskThread::Task::drop() {
  if (!place_) return;
  std::unique_lock lock(thread_->mutex_);
  const auto place = std::ranges::find(thread_->line_, place_);
  if (place != thread_->line_.end() && !place_->runs) {
    thread_->line_.erase(place);
  } else if (place != thread_->line_.end()) {
    lock.unlock();
    place_->stop.request_stop();
    lock.lock();
    thread_->changed_.wait(lock, [&] { return std::ranges::find(thread_->line_, place_) == thread_->line_.end(); });
  }
  lock.unlock();
  place_ = nullptr;
  thread_ = nullptr;
}

TaskThread::Task TaskThread::start(const std::shared_ptr<TaskThread>& thread, Work work) {
  Task task;
  task.thread_ = thread;
  task.place_ = std::make_shared<Task::Place>(Task::Place{.work = std::move(work)});
  const std::lock_guard lock(thread->mutex_);
  thread->line_.push_back(task.place_);
  if (!thread->thread_.joinable()) {
    thread->thread_ = std::jthread([self = thread.get()](const std::stop_token& ends) { self->run(ends); });
  }
  thread->changed_.notify_all();
  return task;
}

void TaskThread::run(const std::stop_token& ends) {
  std::unique_lock lock(mutex_);
  while (changed_.wait(lock, ends, [&] { return !line_.empty(); })) {
    const std::shared_ptr<Task::Place> place = line_.front();
    place->runs = true;
    lock.unlock();
    place->work(place->stop.get_token());
    place->work = nullptr;  // what it holds goes here, and not with the lock
    lock.lock();
    line_.pop_front();
    changed_.notify_all();
  }
}

}  // namespace knapformer
