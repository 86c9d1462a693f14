#include "thread_group.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace {

class ThreadWork : public c10d::Work {
 public:
  using Work::finish;
};

/// One rank's part in a collective: the bytes for each peer, and room for those that each peer sends.
struct Part {
  at::Tensor recv, send;
  std::vector<int64_t> recv_splits, send_splits;  // in elements
  bool sends_all_to_each = false;
  c10::intrusive_ptr<ThreadWork> work;
};

/// Where the ranks of a group meet. Collectives are matched by their order; the last rank to come copies.
class MeetingPoint {
 public:
  explicit MeetingPoint(size_t num_ranks) : num_begun_(num_ranks, 0) {}
  c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();

  c10::intrusive_ptr<c10d::Work> join(size_t rank, Part part) {
    const std::lock_guard lock(mutex_);
    const int64_t call = num_begun_[rank]++;
    std::vector<Part>& parts = calls_[call];
    parts.resize(num_begun_.size());
    const c10::intrusive_ptr<ThreadWork> work = part.work = c10::make_intrusive<ThreadWork>();
    parts[rank] = std::move(part);
    if (std::all_of(parts.begin(), parts.end(), [](const Part& p) { return p.work != nullptr; })) {
      copy(parts);
      for (const Part& p : parts) p.work->finish(nullptr);
      calls_.erase(call);
    }
    return work;
  }

 private:
  static void copy(std::vector<Part>& parts) {
    for (size_t to = 0; to < parts.size(); ++to) {
      auto* out = static_cast<std::byte*>(parts[to].recv.mutable_data_ptr());
      for (size_t from = 0; from < parts.size(); ++from) {
        const Part& sender = parts[from];
        const size_t item = sender.send.itemsize();
        int64_t first = 0;
        for (size_t i = 0; i < to && !sender.sends_all_to_each; ++i) first += sender.send_splits[i];
        const auto bytes = static_cast<size_t>(parts[to].recv_splits[from]) * item;
        if (bytes > 0) {
          std::memcpy(out,
                      static_cast<const std::byte*>(sender.send.const_data_ptr()) + first * static_cast<int64_t>(item),
                      bytes);
        }
        out += bytes;
      }
    }
  }

  std::mutex mutex_;
  std::map<int64_t, std::vector<Part>> calls_;
  std::vector<int64_t> num_begun_;
};

class ThreadBackend : public c10d::Backend {
 public:
  ThreadBackend(std::shared_ptr<MeetingPoint> meeting_point, int rank, int size)
      : Backend(rank, size), meeting_point_(std::move(meeting_point)) {}

  const std::string getBackendName() const override { return "threads"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }

  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& recv, at::Tensor& send, std::vector<int64_t>& recv_splits,
                                               std::vector<int64_t>& send_splits,
                                               const c10d::AllToAllOptions&) override {
    return meeting_point_->join(static_cast<size_t>(getRank()), {.recv = recv,
                                                                 .send = send,
                                                                 .recv_splits = recv_splits,
                                                                 .send_splits = send_splits,
                                                                 .sends_all_to_each = false,
                                                                 .work = {}});
  }

  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& recv, at::Tensor& send,
                                                 const c10d::AllgatherOptions&) override {
    const std::vector<int64_t> splits(static_cast<size_t>(getSize()), send.numel());
    return meeting_point_->join(static_cast<size_t>(getRank()), {.recv = recv,
                                                                 .send = send,
                                                                 .recv_splits = splits,
                                                                 .send_splits = splits,
                                                                 .sends_all_to_each = true,
                                                                 .work = {}});
  }

 private:
  std::shared_ptr<MeetingPoint> meeting_point_;
  c10::intrusive_ptr<Options> options_ = c10::make_intrusive<Options>("threads", std::chrono::seconds(60));
};

}  // namespace

struct ThreadGroups::State {
  std::mutex mutex;
  std::map<std::vector<int64_t>, std::shared_ptr<MeetingPoint>> meeting_points;
};

ThreadGroups::ThreadGroups() : state_(std::make_unique<State>()) {}
ThreadGroups::~ThreadGroups() = default;

c10::intrusive_ptr<c10d::ProcessGroup> ThreadGroups::group(const std::vector<int64_t>& ranks, int64_t rank) {
  std::shared_ptr<MeetingPoint> meeting_point;
  {
    const std::lock_guard lock(state_->mutex);
    std::shared_ptr<MeetingPoint>& found = state_->meeting_points[ranks];
    if (!found) found = std::make_shared<MeetingPoint>(ranks.size());
    meeting_point = found;
  }
  const auto index = static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
  const auto size = static_cast<int>(ranks.size());
  auto group = c10::make_intrusive<c10d::ProcessGroup>(meeting_point->store, index, size);
  group->setBackend(at::kCPU, c10d::ProcessGroup::CUSTOM,
                    c10::make_intrusive<ThreadBackend>(meeting_point, index, size));
  group->setDefaultBackend(c10d::ProcessGroup::CUSTOM);
  return group;
}
