#include "knapformer/torch/task_thread.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <future>
#include <memory>
#include <set>
#include <vector>

namespace knapformer {
namespace {

using Id = std::thread::id;

TEST(TaskThread, RunsTasksInOrderOnOneThread) {
  const auto thread = TaskThread::make();
  std::vector<int> order;
  std::set<Id> ids;
  for (int round = 0; round < 3; ++round) {  // the line is empty between rounds
    std::vector<TaskThread::Task> tasks;
    std::promise<void> done;
    for (int i = 0; i < 4; ++i) {
      tasks.push_back(TaskThread::start(thread, [&, i](const std::stop_token&) {
        order.push_back(i);
        ids.insert(std::this_thread::get_id());
        if (i == 3) done.set_value();
      }));
    }
    done.get_future().wait();
  }
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3}));
  EXPECT_EQ(ids.size(), 1u);
  EXPECT_FALSE(ids.contains(std::this_thread::get_id()));
}

TEST(TaskThread, ADroppedTaskIsStoppedOrNeverRuns) {
  const auto thread = TaskThread::make();
  std::promise<void> began;
  bool stopped = false, ran = false;
  const auto until_stopped = [&](const std::stop_token& stop) {
    std::promise<void> stop_requested;
    const std::stop_callback callback(stop, [&] { stop_requested.set_value(); });
    began.set_value();
    stop_requested.get_future().wait();
    stopped = true;
  };
  TaskThread::Task running = TaskThread::start(thread, until_stopped);
  TaskThread::Task waiting = TaskThread::start(thread, [&](const std::stop_token&) { ran = true; });
  began.get_future().wait();
  waiting = {};  // at once: it does not wait for the one that runs
  EXPECT_FALSE(stopped);
  running = {};
  EXPECT_TRUE(stopped);
  std::promise<void> done;
  const TaskThread::Task next = TaskThread::start(thread, [&](const std::stop_token&) { done.set_value(); });
  done.get_future().wait();
  EXPECT_FALSE(ran);
}

TEST(TaskThread, AForkedProcessWaitsForNone) {
  auto thread = TaskThread::make();
  std::promise<void> began, ends;
  TaskThread::Task running = TaskThread::start(thread, [&](const std::stop_token&) {
    began.set_value();
    ends.get_future().wait();
  });
  TaskThread::Task waiting = TaskThread::start(thread, [](const std::stop_token&) {});
  began.get_future().wait();
  const pid_t forked = ::fork();
  if (forked == 0) {
    ::alarm(60);  // ends a process that waits
    waiting = {};
    running = {};
    thread = nullptr;
    ::_exit(0);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(forked, &status, 0), forked);
  EXPECT_TRUE(WIFEXITED(status));
  ends.set_value();
}

TEST(TaskThread, TasksOutliveWhoStartedThemAndLetGoOfWhatTheyHold) {
  auto thread = TaskThread::make();
  auto held = std::make_shared<int>(7);
  std::promise<int> seen;
  TaskThread::Task task = TaskThread::start(thread, [held, &seen](const std::stop_token&) { seen.set_value(*held); });
  thread = nullptr;
  EXPECT_EQ(seen.get_future().get(), 7);
  task = {};
  EXPECT_EQ(held.use_count(), 1);
}

}  // namespace
}  // namespace knapformer
