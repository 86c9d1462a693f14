#include "collectives.h"

#include <ATen/ops/empty.h>

#include <cstring>

#include "counters.h"
#include "memory.h"

namespace simulated_device {
namespace {

struct Gate {
  std::mutex mutex;
  std::condition_variable changed;
  bool held = false;
};

Gate& gate() {
  static auto* const instance = new Gate;
  return *instance;
}

std::byte* memory_of(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.is_contiguous(), "simulated device: expected a contiguous tensor");
  if (tensor.is_cpu()) return static_cast<std::byte*>(tensor.data_ptr());
  return DeviceMemory::instance().for_kernels(tensor.data_ptr());
}

}  // namespace

void hold_collectives(bool held) {
  const std::lock_guard lock(gate().mutex);
  gate().held = held;
  gate().changed.notify_all();
}

struct LateCollectives::Task final : c10d::Work {
  at::Tensor input, output;
  std::function<void(at::Tensor&, at::Tensor&)> run;

  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  std::exception_ptr error;

  bool isCompleted() override {
    const std::lock_guard lock(mutex);
    return done;
  }
  bool isSuccess() const override { return error == nullptr; }
  std::exception_ptr exception() const override { return error; }
  /// On a GPU the stream would wait, and the host would go on. Here the host is the one stream, so it waits.
  bool wait(std::chrono::milliseconds timeout) override {
    std::unique_lock lock(mutex);
    const auto is_done = [&] { return done; };
    if (timeout == kNoTimeout) {
      changed.wait(lock, is_done);
    } else if (!changed.wait_for(lock, timeout, is_done)) {
      throw std::runtime_error("timed out");
    }
    if (error) std::rethrow_exception(error);
    return true;
  }

  void finish(std::exception_ptr with) {
    const std::lock_guard lock(mutex);
    error = std::move(with);
    done = true;
    input.reset();
    output.reset();
    changed.notify_all();
  }
};

LateCollectives::LateCollectives(c10::intrusive_ptr<c10d::Backend> hosts)
    : Backend(hosts->getRank(), hosts->getSize()), hosts_(std::move(hosts)), thread_([this] { run_tasks(); }) {}

LateCollectives::~LateCollectives() {
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void LateCollectives::run_tasks() {
  while (true) {
    c10::intrusive_ptr<Task> task;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return ended_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      task = tasks_.front();
      tasks_.pop_front();
    }
    {
      std::unique_lock lock(gate().mutex);
      gate().changed.wait(lock, [] { return !gate().held; });
    }
    try {
      const auto host_tensor = [](const at::Tensor& like) {
        return at::empty(like.sizes(), like.options().device(at::kCPU));
      };
      const at::Tensor& from = task->input;
      const at::Tensor& to = task->output;
      at::Tensor input = host_tensor(from), output = host_tensor(to);
      if (input.nbytes() > 0) std::memcpy(input.mutable_data_ptr(), memory_of(from), input.nbytes());
      task->run(input, output);
      if (output.nbytes() > 0) std::memcpy(memory_of(to), output.const_data_ptr(), output.nbytes());
      task->finish(nullptr);
    } catch (...) {
      task->finish(std::current_exception());
    }
  }
}

c10::intrusive_ptr<c10d::Work> LateCollectives::launch(const at::Tensor& input, const at::Tensor& output,
                                                       std::function<void(at::Tensor&, at::Tensor&)> run) {
  ++Counters::instance().collectives;
  auto task = c10::make_intrusive<Task>();
  task->input = input.detach();
  task->output = output.detach();
  task->run = std::move(run);
  if (output.nbytes() > 0 && !output.is_alias_of(input)) std::memset(memory_of(output), 0xff, output.nbytes());
  {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(task);
  }
  changed_.notify_all();
  return task;
}

c10::intrusive_ptr<c10d::Work> LateCollectives::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                              std::vector<int64_t>& output_splits,
                                                              std::vector<int64_t>& input_splits,
                                                              const c10d::AllToAllOptions& options) {
  return launch(input, output, [=, hosts = hosts_](at::Tensor& in, at::Tensor& out) mutable {
    hosts->alltoall_base(out, in, output_splits, input_splits, options)->wait();
  });
}

c10::intrusive_ptr<c10d::Work> LateCollectives::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                                const c10d::AllgatherOptions& options) {
  return launch(input, output, [=, hosts = hosts_](at::Tensor& in, at::Tensor& out) {
    hosts->_allgather_base(out, in, options)->wait();
  });
}

c10::intrusive_ptr<c10d::Work> LateCollectives::allreduce(std::vector<at::Tensor>& tensors,
                                                          const c10d::AllreduceOptions& options) {
  return launch(tensors.at(0), tensors.at(0), [=, hosts = hosts_](at::Tensor& in, at::Tensor& out) {
    std::vector<at::Tensor> list{in};
    hosts->allreduce(list, options)->wait();
    out = in;
  });
}

c10::intrusive_ptr<c10d::Work> LateCollectives::broadcast(std::vector<at::Tensor>& tensors,
                                                          const c10d::BroadcastOptions& options) {
  return launch(tensors.at(0), tensors.at(0), [=, hosts = hosts_](at::Tensor& in, at::Tensor& out) {
    std::vector<at::Tensor> list{in};
    hosts->broadcast(list, options)->wait();
    out = in;
  });
}

}  // namespace simulated_device
