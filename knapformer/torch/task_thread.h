// A thread for work that runs beside the caller's, one task after another.
//
// One thread, and not one for each task: c10d keeps about 120 bytes for every thread that has ever waited for a
// collective.
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace knapformer {

class TaskThread {
 public:
  /// Never throws; returns soon after a stop is requested.
  using Work = std::function<void(const std::stop_token&)>;

  /// A task's place in the queue. Its destructor removes the work from the queue or, if the work runs already, requests
  /// a stop and waits for its end.
  class Task {
   public:
    Task() = default;
    Task(Task&&) = default;
    Task& operator=(Task&& other) noexcept;
    ~Task() { drop(); }

   private:
    friend class TaskThread;
    struct Place;
    void drop();

    std::shared_ptr<TaskThread> thread_;
    std::shared_ptr<Place> place_;
  };

  /// A process that is forked from this one does not have the thread. There, its tasks stay undone, nothing waits for
  /// them, and the TaskThread is never destroyed.
  static std::shared_ptr<TaskThread> make();
  ~TaskThread() = default;
  TaskThread(const TaskThread&) = delete;
  TaskThread& operator=(const TaskThread&) = delete;

  /// Queues the work. The first task starts the thread. A task keeps its TaskThread alive.
  static Task start(const std::shared_ptr<TaskThread>& thread, Work work);

 private:
  TaskThread() = default;
  void run(const std::stop_token& ends);
  void take_out(const std::shared_ptr<Task::Place>& task);

  const pid_t process_ = ::getpid();
  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::deque<std::shared_ptr<Task::Place>> line_;  // the queue; its first entry runs
  std::jthread thread_;                            // the last member: it ends first
};

}  // namespace knapformer
