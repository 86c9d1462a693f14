#include "knapformer/torch/task_thread.h"

#include <algorithm>
#include <utility>

#include "knapformer/core/util/process.h"

namespace knapformer {

struct TaskThread::Task::Place {
  Work work;
  std::stop_source stop = {};
  bool runs = false;
};

std::shared_ptr<TaskThread> TaskThread::make() {
  return owned_by_this_process(std::unique_ptr<TaskThread>(new TaskThread));
}

TaskThread::Task& TaskThread::Task::operator=(Task&& other) noexcept {
  drop();
  thread_ = std::move(other.thread_);
  place_ = std::move(other.place_);
  return *this;
}

void TaskThread::Task::drop() {
  if (!place_) return;
  if (thread_->process_ == ::getpid()) thread_->take_out(place_);
  place_ = nullptr;
  thread_ = nullptr;
}

void TaskThread::take_out(const std::shared_ptr<Task::Place>& task) {
  std::unique_lock lock(mutex_);
  const auto place = std::ranges::find(line_, task);
  if (place == line_.end()) return;
  if (!task->runs) {
    line_.erase(place);
    return;
  }
  lock.unlock();
  task->stop.request_stop();
  lock.lock();
  changed_.wait(lock, [&] { return std::ranges::find(line_, task) == line_.end(); });
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
    place->work = nullptr;  // what the work holds is freed here, without the lock
    lock.lock();
    line_.pop_front();
    changed_.notify_all();
  }
}

}  // namespace knapformer
