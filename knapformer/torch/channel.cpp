#include "knapformer/torch/channel.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "knapformer/core/error.h"

namespace knapformer {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<Channel>, std::less<>> channels;
  std::atomic<void (*)(ProcessGroupPtr)> drop_group{[](ProcessGroupPtr) {}};
};

Registry& registry() {
  static auto* const instance = new Registry;  // never destroyed: channels may outlive static objects
  return *instance;
}

/// Counts its own life as waiting.
class WaitClock {
 public:
  WaitClock(ChannelCounters& counters, bool counts) : counters_(counters), counts_(counts) {}
  ~WaitClock() {
    const auto waited = std::chrono::steady_clock::now() - begin_;
    if (counts_) counters_.waited_ns += std::chrono::duration_cast<std::chrono::nanoseconds>(waited).count();
  }
  WaitClock(const WaitClock&) = delete;
  WaitClock& operator=(const WaitClock&) = delete;

 private:
  ChannelCounters& counters_;
  bool counts_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

}  // namespace

std::chrono::milliseconds timeout_of(c10d::ProcessGroup& group) {
  try {
    return group.getBackend(group.getDeviceTypes().at(0).type())->getBackendOptions()->timeout;
  } catch (const std::exception&) {
    return kBackendDefaultTimeout;  // a backend that does not tell
  }
}

Channel::Channel(std::string name, ProcessGroupPtr group, const std::string& store_prefix,
                 std::shared_ptr<Lookout> lookout, int32_t first_rank)
    : name_(std::move(name)),
      group_(std::move(group)),
      rank_(group_->getRank()),
      num_ranks_(group_->getSize()),
      lookout_(std::move(lookout)) {
  agreement_ = std::make_shared<Agreement>(c10::make_intrusive<c10d::PrefixStore>(store_prefix, group_->getStore()),
                                           RankOf{.rank = rank_, .num_ranks = num_ranks_, .first_number = first_rank},
                                           timeout_of(*group_), lookout_);
  lookout_->watch(agreement_);
}

std::shared_ptr<Channel> Channel::make(std::string_view name, ProcessGroupPtr group, const std::string& store_prefix,
                                       std::shared_ptr<Lookout> lookout, int32_t first_rank) {
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  std::string unique(name);
  for (int32_t i = 1; r.channels.contains(unique); ++i) unique = text(name, "#", i);
  const std::shared_ptr<Channel> channel(
      new Channel(unique, std::move(group), store_prefix, std::move(lookout), first_rank));
  r.channels.emplace(unique, channel);
  return channel;
}

std::shared_ptr<Channel> Channel::find(std::string_view name) {
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  if (const auto it = r.channels.find(name); it != r.channels.end()) {
    if (std::shared_ptr<Channel> channel = it->second.lock()) return channel;
  }
  throw StateError(text("channel: got the name ", name, ", expected that of a balancer that still exists"));
}

void Channel::release_groups() {
  Registry& r = registry();
  std::vector<std::shared_ptr<Channel>> channels;  // dropped after the lock, which their end takes
  {
    const std::lock_guard lock(r.mutex);
    for (const auto& [name, channel] : r.channels) channels.push_back(channel.lock());
  }
  for (const std::shared_ptr<Channel>& channel : channels) {
    if (!channel) continue;
    ProcessGroupPtr group;  // likewise: its threads may be what still uses the channel
    const std::lock_guard lock(channel->group_mutex_);
    group.swap(channel->group_);
  }
}

void Channel::set_drop_group(void (*drop)(ProcessGroupPtr group)) { registry().drop_group = drop; }

Channel::~Channel() {
  Registry& r = registry();
  {
    const std::lock_guard lock(r.mutex);
    r.channels.erase(name_);
  }
  r.drop_group.load()(std::move(group_));
}

ProcessGroupPtr Channel::group() const {
  const std::lock_guard lock(group_mutex_);
  if (!group_) throw StateError("group: let go as the process ends, expected no more collectives");
  return group_;
}

at::Device Channel::control_device() const {
  const std::vector<at::Device> devices = group()->getDeviceTypes();
  if (devices.empty()) throw StateError("group: got one without a backend, expected a group that can communicate");
  const bool has_cpu = std::any_of(devices.begin(), devices.end(), [](const at::Device& d) { return d.is_cpu(); });
  return has_cpu ? at::Device(at::kCPU) : devices.front();
}

void Channel::wait(c10d::Work& work, at::Device device, std::string_view label, bool on_host,
                   const std::stop_token& stop) {
  RECORD_USER_SCOPE(text("knapformer::wait ", label));
  const bool in_background = stop.stop_possible();  // nobody's wait
  const WaitClock clock(counters_, /*counts=*/!in_background);
  Wait wait(*lookout_, label);
  const auto look = [&] {
    if (stop.stop_requested()) throw StateError(text(label, ": no longer wanted"));
    in_background ? wait.look_aside() : wait.look();
  };
  const auto fail = [&](const std::exception& error) {
    lookout_->look();  // a rank that raised and left is the better reason
    const std::string absent = wait.absent(*agreement_);
    throw StateError(text(label, ": the collective failed on rank ", agreement_->number_of(rank()), ": ", error.what(),
                          absent.empty() ? "" : "; not in this call: ", absent));
  };
  if (!device.is_cpu()) {
    // A host wait of an accelerator's work can not be cut short on every backend: ask instead.
    using Clock = std::chrono::steady_clock;
    Clock::time_point next_look = Clock::now() + wait.patience();
    while (on_host && !work.isCompleted()) {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
      if (Clock::now() < next_look) continue;
      look();
      next_look = Clock::now() + wait.patience();
    }
    try {
      work.wait();
      wait.end();
    } catch (const std::exception& error) {
      fail(error);
    }
    return;
  }
  for (;;) {
    const auto begin = std::chrono::steady_clock::now();
    try {
      work.wait(wait.patience());  // on a timeout it throws, and the work goes on
      wait.end();
      return;
    } catch (const std::exception& error) {
      if (work.isCompleted()) {
        if (work.exception()) fail(error);
        continue;  // it became so just now: wait once more, for what wait does at its end
      }
      if (std::chrono::steady_clock::now() - begin < wait.patience() / 2) fail(error);  // that was no timeout
    }
    look();
  }
}

}  // namespace knapformer
