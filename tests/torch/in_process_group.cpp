#include "tests/torch/in_process_group.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <thread>

#include "knapformer/core/util/error.h"

namespace knapformer::testing {

class InProcessWork : public c10d::Work {
 public:
  using Work::finish;
};

struct Part {
  std::string kind;
  at::Tensor recv, send;
  std::vector<int64_t> recv_splits, send_splits;
  c10::intrusive_ptr<InProcessWork> work;
  CollectiveCounts* counts = nullptr;
};

/// Where the ranks of one group meet: collectives are matched by their order. The last rank to come does the copying.
class MeetingPoint {
 public:
  explicit MeetingPoint(size_t num_ranks) : next_(num_ranks, 0), num_ranks_(num_ranks) {}

  c10::intrusive_ptr<c10d::Store> store() { return store_; }

  c10::intrusive_ptr<c10d::Work> join(size_t rank, Part part) {
    const std::lock_guard lock(mutex_);
    std::vector<Part>& parts = open_[next_[rank]];
    parts.resize(num_ranks_);
    const c10::intrusive_ptr<InProcessWork> work = part.work = c10::make_intrusive<InProcessWork>();
    parts[rank] = std::move(part);
    const int64_t place = next_[rank]++;
    bool complete = true;
    for (const Part& p : parts) complete = complete && p.work;
    if (complete) {
      const std::exception_ptr error = run(parts);
      for (Part& p : parts) p.work->finish(error);
      open_.erase(place);
    }
    return work;
  }

 private:
  static std::exception_ptr run(std::vector<Part>& parts) try {
    for (const Part& part : parts) {
      if (part.kind != parts[0].kind) throw std::runtime_error(part.kind + " meets " + parts[0].kind);
    }
    for (size_t to = 0; to < parts.size(); ++to) {
      Part& receiver = parts[to];
      int64_t offset = 0;
      for (size_t from = 0; from < parts.size(); ++from) {
        const Part& sender = parts[from];
        const int64_t expected = receiver.recv_splits[from], sent = sender.send_splits[to];
        // What makes Gloo abort the process.
        if (expected != sent) {
          throw std::runtime_error("splits: rank " + std::to_string(to) + " expects " + std::to_string(expected) +
                                   " from rank " + std::to_string(from) + ", which sends " + std::to_string(sent));
        }
        const int64_t first =
            sender.kind == "all_gather"
                ? 0
                : std::accumulate(sender.send_splits.begin(),
                                  sender.send_splits.begin() + static_cast<std::ptrdiff_t>(to), int64_t{0});
        const auto item = static_cast<int64_t>(sender.send.itemsize());
        if (sent > 0) {
          std::memcpy(static_cast<std::byte*>(receiver.recv.mutable_data_ptr()) + offset * item,
                      static_cast<const std::byte*>(sender.send.const_data_ptr()) + first * item,
                      static_cast<size_t>(sent * item));
        }
        offset += expected;
        if (sender.kind == "all_to_all") {
          parts[from].counts->bytes_sent += sent * item;
          if (from == to) parts[from].counts->bytes_sent_to_self += sent * item;
        }
      }
      if (offset != receiver.recv.numel()) throw std::runtime_error("splits do not add up to the receiving tensor");
    }
    return nullptr;
  } catch (...) {
    return std::current_exception();
  }

  c10::intrusive_ptr<c10d::Store> store_ = c10::make_intrusive<c10d::HashStore>();
  std::mutex mutex_;
  std::map<int64_t, std::vector<Part>> open_;
  std::vector<int64_t> next_;
  size_t num_ranks_;
};

namespace {

class InProcessBackend : public c10d::Backend {
 public:
  InProcessBackend(std::shared_ptr<MeetingPoint> board, int rank, int size, CollectiveCounts& counts,
                   std::chrono::milliseconds timeout)
      : Backend(rank, size),
        board_(std::move(board)),
        counts_(counts),
        options_(c10::make_intrusive<Options>("in_process", timeout)) {}

  const std::string getBackendName() const override { return "in_process"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }

  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& recv, at::Tensor& send, std::vector<int64_t>& recv_splits,
                                               std::vector<int64_t>& send_splits,
                                               const c10d::AllToAllOptions&) override {
    ++counts_.all_to_all;
    return board_->join(rank(), {.kind = "all_to_all",
                                 .recv = recv,
                                 .send = send,
                                 .recv_splits = recv_splits,
                                 .send_splits = send_splits,
                                 .work = {},
                                 .counts = &counts_});
  }

  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& recv, at::Tensor& send,
                                                 const c10d::AllgatherOptions&) override {
    ++counts_.all_gather;
    const std::vector<int64_t> splits(static_cast<size_t>(getSize()), send.numel());
    return board_->join(rank(), {.kind = "all_gather",
                                 .recv = recv,
                                 .send = send,
                                 .recv_splits = splits,
                                 .send_splits = splits,
                                 .work = {},
                                 .counts = &counts_});
  }

 private:
  size_t rank() const { return static_cast<size_t>(getRank()); }

  std::shared_ptr<MeetingPoint> board_;
  CollectiveCounts& counts_;
  c10::intrusive_ptr<Options> options_;
};

}  // namespace

InProcessWorld::InProcessWorld(int32_t num_ranks, std::chrono::milliseconds timeout)
    : num_ranks_(num_ranks), timeout_(timeout) {
  for (int32_t i = 0; i < num_ranks; ++i) counts_.push_back(std::make_unique<CollectiveCounts>());
}

InProcessWorld::~InProcessWorld() = default;

c10::intrusive_ptr<c10d::ProcessGroup> InProcessWorld::group(const std::vector<int64_t>& ranks, int64_t rank) {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<MeetingPoint>& board = boards_[ranks];
  if (!board) board = std::make_shared<MeetingPoint>(ranks.size());
  c10::intrusive_ptr<c10d::ProcessGroup>& group = groups_[{ranks, rank}];
  if (!group) {
    const auto index = static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
    const auto size = static_cast<int>(ranks.size());
    group = c10::make_intrusive<c10d::ProcessGroup>(board->store(), index, size);
    group->setBackend(at::kCPU, c10d::ProcessGroup::CUSTOM,
                      c10::make_intrusive<InProcessBackend>(board, index, size, counts(rank), timeout_));
    group->setDefaultBackend(c10d::ProcessGroup::CUSTOM);
    std::string members;
    for (const int64_t r : ranks) members += text('.', r);
    group->setGroupName(text("test", members, "@", rank));
  }
  return group;
}

c10::intrusive_ptr<c10d::ProcessGroup> InProcessWorld::all(int64_t rank) {
  std::vector<int64_t> ranks(static_cast<size_t>(num_ranks_));
  std::iota(ranks.begin(), ranks.end(), 0);
  return group(ranks, rank);
}

std::vector<std::exception_ptr> InProcessWorld::run(const std::function<void(int32_t)>& body) {
  std::vector<std::exception_ptr> errors(static_cast<size_t>(num_ranks_));
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < num_ranks_; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (...) {
        errors[static_cast<size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

void InProcessWorld::run_all(const std::function<void(int32_t)>& body) {
  const std::vector<std::exception_ptr> errors = run(body);
  for (size_t rank = 0; rank < errors.size(); ++rank) {
    if (errors[rank]) ADD_FAILURE() << "rank " << rank << ": " << describe(errors[rank]);
  }
}

std::string describe(const std::exception_ptr& error) {
  if (!error) return "";
  try {
    std::rethrow_exception(error);
  } catch (const ArgumentError& e) {
    return std::string("ArgumentError: ") + e.what();
  } catch (const StateError& e) {
    return std::string("StateError: ") + e.what();
  } catch (const std::exception& e) {
    return std::string("exception: ") + e.what();
  }
}

}  // namespace knapformer::testing
