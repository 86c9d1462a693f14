#include "knapformer/torch/comm/comm_group.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "knapformer/core/util/error.h"
#include "knapformer/core/util/process.h"

namespace knapformer {
namespace {

struct Registry {
  std::mutex mutex;
  std::vector<std::weak_ptr<CommGroup>> groups;  // all that live, at least
  std::atomic<void (*)(ProcessGroupPtr)> drop_process_group{[](ProcessGroupPtr) {}};
};

Registry& registry() {
  static auto* const instance = new Registry;  // never destroyed: comm groups may outlive static objects
  return *instance;
}

// all_to_all_single and all_gather_single are the newer names; the older ones are deprecated where the newer ones
// exist. These are templates, so that only the branch whose function exists is compiled.
template <class Group>
WorkPtr all_to_all(Group& group, at::Tensor& recv, at::Tensor& send, std::vector<int64_t>& recv_splits,
                   std::vector<int64_t>& send_splits) {
  if constexpr (requires { group.all_to_all_single(recv, send, recv_splits, send_splits); }) {
    return group.all_to_all_single(recv, send, recv_splits, send_splits);
  } else {
    return group.alltoall_base(recv, send, recv_splits, send_splits);
  }
}

template <class Group>
WorkPtr all_gather(Group& group, at::Tensor& gathered, at::Tensor& own) {
  if constexpr (requires { group.all_gather_single(gathered, own); }) {
    return group.all_gather_single(gathered, own);
  } else {
    return group._allgather_base(gathered, own);
  }
}

}  // namespace

std::chrono::milliseconds timeout_of(c10d::ProcessGroup& group) {
  try {
    return group.getBackend(group.getDeviceTypes().at(0).type())->getBackendOptions()->timeout;
  } catch (const std::exception&) {
    return kBackendDefaultTimeout;  // a backend that does not tell its timeout
  }
}

CommGroup::CommGroup(ProcessGroupPtr group, const std::string& store_prefix, std::shared_ptr<PeerErrors> peer_errors,
                     int32_t first_rank)
    : process_group_(std::move(group)), peer_errors_(std::move(peer_errors)) {
  const RankInGroup place{
      .rank = process_group_->getRank(), .num_ranks = process_group_->getSize(), .first_number = first_rank};
  fingerprints_ = std::make_shared<CallFingerprints>(
      c10::make_intrusive<c10d::PrefixStore>(store_prefix, process_group_->getStore()), place,
      timeout_of(*process_group_), peer_errors_);
  peer_errors_->watch(fingerprints_);
}

std::shared_ptr<CommGroup> CommGroup::make(ProcessGroupPtr group, const std::string& store_prefix,
                                           std::shared_ptr<PeerErrors> peer_errors, int32_t first_rank) {
  const std::shared_ptr<CommGroup> made = owned_by_this_process(
      std::unique_ptr<CommGroup>(new CommGroup(std::move(group), store_prefix, std::move(peer_errors), first_rank)));
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  std::erase_if(r.groups, [](const std::weak_ptr<CommGroup>& known) { return known.expired(); });
  r.groups.push_back(made);
  return made;
}

void CommGroup::release_process_groups() {
  Registry& r = registry();
  const std::lock_guard registry_lock(r.mutex);
  for (const std::weak_ptr<CommGroup>& known : r.groups) {
    const std::shared_ptr<CommGroup> group = known.lock();
    if (!group || group->process_ != ::getpid()) continue;
    group->peer_errors().leave(/*at_end=*/true);
    ProcessGroupPtr released, released_cpu;  // dropped after the lock, too: their threads may still use the comm group
    const std::lock_guard lock(group->mutex_);
    released.swap(group->process_group_);
    released_cpu.swap(group->cpu_group_);
  }
}

void CommGroup::set_drop_process_group(void (*drop)(ProcessGroupPtr group)) { registry().drop_process_group = drop; }

CommGroup::~CommGroup() {
  auto* const drop = registry().drop_process_group.load();
  drop(std::move(cpu_group_));
  drop(std::move(process_group_));
}

ProcessGroupPtr CommGroup::group_for(at::Device device) const {
  const std::lock_guard lock(mutex_);
  if (device.is_cpu() && cpu_group_) return cpu_group_;
  if (!process_group_) throw StateError("group: let go as the process ends, expected no more collectives");
  return process_group_;
}

void CommGroup::use_cpu_group(ProcessGroupPtr group) {
  const std::lock_guard lock(mutex_);
  cpu_group_ = std::move(group);
}

at::Device CommGroup::control_device() const {
  const std::vector<at::Device> devices = group_for(at::kCPU)->getDeviceTypes();
  if (devices.empty()) throw StateError("group: got one without a backend, expected a group that can communicate");
  const auto cpu = std::ranges::find(devices, at::kCPU, &at::Device::type);
  return cpu != devices.end() ? *cpu : devices.front();
}

void CommGroup::fail(std::string_view label, const std::exception& error) {
  // Another rank's error or end is the better reason, and may take a moment to be known. Meanwhile the others that fail
  // here say that they are here: what is left are the ranks that have ended.
  peer_errors_->show_call(label);
  for (int32_t i = 0; i < 40; ++i) {
    peer_errors_->look();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  const std::string absent = peer_errors_->absent_ranks(*fingerprints_);
  throw StateError(text(label, ": the collective failed on rank ", fingerprints_->place().number(), ": ", error.what(),
                        absent.empty() ? "" : "; not in this call: ", absent));
}

WorkPtr CommGroup::start(std::string_view label, size_t num_bytes, const std::function<WorkPtr()>& launch) {
  counters_.bytes_sent += static_cast<int64_t>(num_bytes);
  counters_.num_collectives += 1;
  try {
    return launch();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    fail(label, error);
  }
}

WorkPtr CommGroup::start_all_to_all(at::Tensor& recv, at::Tensor& send, std::vector<int64_t> recv_splits,
                                    std::vector<int64_t> send_splits, std::string_view label) {
  return start(label, send.nbytes(),
               [&] { return all_to_all(*group_for(send.device()), recv, send, recv_splits, send_splits); });
}

WorkPtr CommGroup::start_all_gather(at::Tensor& gathered, at::Tensor& own, std::string_view label) {
  return start(label, own.nbytes() * static_cast<size_t>(num_ranks() - 1),
               [&] { return all_gather(*group_for(own.device()), gathered, own); });
}

void CommGroup::wait(c10d::Work& work, at::Device device, std::string_view label, bool on_host,
                     const std::stop_token& stop) {
  RECORD_USER_SCOPE(text("knapformer::wait ", label));
  const bool in_background = stop.stop_possible();  // no call on the balancer waits
  const auto wait_begin = std::chrono::steady_clock::now();
  const auto poll = [&](std::chrono::milliseconds patience) {
    if (stop.stop_requested()) throw StateError(text(label, ": no longer wanted"));
    const auto begin = std::chrono::steady_clock::now();
    if (!device.is_cpu()) {
      // Not every backend can cut short a host's wait for an accelerator's work: poll instead.
      for (; on_host && !work.isCompleted(); std::this_thread::sleep_for(std::chrono::microseconds(20))) {
        if (std::chrono::steady_clock::now() > begin + patience) return false;
      }
      patience = kNoTimeout;
    }
    try {
      work.wait(patience);
      return true;
    } catch (const std::exception& error) {
      // On a timeout wait() throws, and the work goes on. If it was no timeout, or the work has failed, this call
      // fails. Work that was completed just now is waited for once more, for the last steps of wait().
      const bool timed_out = device.is_cpu() && std::chrono::steady_clock::now() - begin >= patience / 2;
      if (work.isCompleted() ? work.exception() != nullptr || !device.is_cpu() : !timed_out) fail(label, error);
    }
    return false;
  };
  peer_errors_->wait(label, poll, in_background);
  if (!in_background) counters_.add_wait_since(wait_begin);
}

}  // namespace knapformer
