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

  /// A place in the line. Its destructor takes the work out of the line or, where it runs, requests a stop and waits
  /// for its end.
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

  /// In a process that is forked from this one there is no such thread: what it would do stays undone, nothing waits
  /// for it, and it is not let go of.
  static std::shared_ptr<TaskThread> make();
  ~TaskThread() = default;
  TaskThread(const TaskThread&) = delete;
  TaskThread& operator=(const TaskThread&) = delete;

  /// Begins the thread with the first task. Tasks keep their thread.
  static Task start(const std::shared_ptr<TaskThread>& thread, Work work);

 private:
  TaskThread() = default;
  void run(const std::stop_token& ends);
  void take_out(const std::shared_ptr<Task::Place>& task);

  const pid_t process_ = ::getpid();
  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::deque<std::shared_ptr<Task::Place>> line_;  // the first of it runs
  std::jthread thread_;                            // the last member: it ends first
};

}  // namespace knapformer
