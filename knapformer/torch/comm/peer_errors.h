// How an error on one rank soon becomes an error on all.
//
// A rank that raises leaves its peers waiting in a collective that it will not join. Without this they would wait for
// the group's timeout and learn nothing. So a rank that raises first posts its message in the group's store (the error
// store). A rank that has waited for a moment looks for three things: a posted error; a call that others announced and
// this rank took for another (fingerprint.h); and calls in another order. A balancer has two groups, its own and the
// bag's, so ranks may wait for each other crosswise. Each rank counts the calls that it has come to in either group. If
// two ranks of a bag call in the same order, one of them is at least as far as the other in both groups. So a rank that
// is ahead in one group and behind in the other has called in another order. Outdated counts, of an earlier moment,
// will do.
//
// A rank that leaves, because its balancer or its process ends, says how many calls it has come to: a rank that waits
// in a later call raises. A process that is killed says nothing: its launcher ends the others, or the transport fails.
//
// A step without errors and long waits does not ask the store. Nor does a host that waits for an accelerator.
#pragma once

#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace knapformer {

/// This rank's place in a group. The group's ranks have consecutive numbers in a larger group, and messages name them
/// by these numbers.
struct RankInGroup {
  int32_t rank = 0, num_ranks = 1;
  int32_t first_number = 0;

  int32_t number_of(int32_t other) const { return first_number + other; }
  int32_t number() const { return number_of(rank); }
};

/// A group as PeerErrors sees it.
class WatchedGroup {
 public:
  explicit WatchedGroup(RankInGroup place) : place_(place) {}
  virtual ~WatchedGroup() = default;

  /// Throws where others announced a call that this rank took for another.
  virtual void check_announcements() = 0;
  const RankInGroup& place() const { return place_; }
  /// Calls that this rank has come to, including the one that it is in.
  int64_t num_calls_begun() const { return *num_calls_begun_; }

 protected:
  friend class PeerErrors;
  RankInGroup place_;
  /// Shared with PeerErrors, which outlives the group.
  std::shared_ptr<std::atomic<int64_t>> num_calls_begun_ = std::make_shared<std::atomic<int64_t>>(0);
};

/// One per balancer. The first error that any rank posts stands; the balancer is of no use after it. The methods for
/// errors and notes are thread-safe.
class PeerErrors {
 public:
  /// The note that says why this rank will raise later.
  static constexpr const char* kFailureNote = "failure";

  /// `store`: shared by all ranks, with keys of this balancer alone. num_ranks: 0 for one that does not say when
  /// this rank leaves.
  PeerErrors(c10::intrusive_ptr<c10d::Store> store, int32_t rank, int32_t num_ranks = 0)
      : store_(std::move(store)), rank_(rank), num_ranks_(num_ranks), process_(::getpid()) {}
  ~PeerErrors() { leave(); }
  PeerErrors(const PeerErrors&) = delete;
  PeerErrors& operator=(const PeerErrors&) = delete;

  /// Tells the other ranks that this one will come to no more calls. The last rank to leave removes the balancer's keys
  /// from the store. at_end: the process ends, and perhaps the store with it. Then rank 0 waits up to a second for the
  /// others to leave, too.
  void leave(bool at_end = false) noexcept;

  /// Tells the other ranks of an error of this one. Never throws: there is an error to raise already.
  void post(const std::exception& error) noexcept;
  /// Throws what another rank posted: an error of the same kind, which names that rank. Asks the store.
  void check_errors();
  /// Throws StateError where this rank has posted or found an error before. Does not ask the store.
  void check_usable();
  /// Runs `call`; posts what it throws.
  template <class Call>
  decltype(auto) guard(Call call) {
    try {
      return call();
    } catch (const c10::DistNetworkError& error) {
      throw_store_lost(error);
    } catch (const std::exception& error) {
      post(error);
      throw;
    }
  }

  /// Leaves a note for the other ranks: the position of this one, or kFailureNote. Notes stay until the last rank has
  /// left. A store waits for a key that it does not have, so a rank that has just seen a note must still find it.
  void leave_note(std::string_view name, const std::string& note);
  /// Nothing where `rank` has left none.
  std::optional<std::string> note_of(int32_t rank, std::string_view name) const;

  /// Watches a group: first the balancer's, then the bag's where that is another one.
  void watch(const std::shared_ptr<WatchedGroup>& group);
  /// Waits in `label` ("route(x)") until poll returns true. Each time poll returns false, looks, and throws what it
  /// finds. poll is given the time that it may take: longer each time, up to a second. in_background: this is not the
  /// thread that makes the calls, so their order is not checked.
  using Poll = std::function<bool(std::chrono::milliseconds)>;
  void wait(std::string_view label, const Poll& poll, bool in_background = false);
  /// Throws where another rank has posted an error, announced another call, or left. Asks the store.
  void look();
  /// Lets the other ranks see that this one has come to `label`.
  void show_call(std::string_view label) { show(position(std::string(label))); }
  /// The ranks that have not come as far as this one: "rank 1 (in route(x)), rank 3 (in no call)". For messages: it
  /// asks the store for each rank.
  std::string absent_ranks(const WatchedGroup& group) const;

 private:
  static constexpr size_t kMaxGroups = 2;
  /// Where a rank is, as others see it in the store.
  struct Position {
    std::array<int64_t, kMaxGroups> counts = {};  // calls begun, by group
    bool has_left = false;
    std::string call;  // the one that the rank waits in; empty: none
  };
  std::shared_ptr<WatchedGroup> group(size_t i) const;  // null where there is none (any more)
  Position position(const std::string& call) const;
  std::optional<Position> position_of(int32_t rank) const;
  void show(const Position& position);
  void check_order(const Position& own) const;
  void check_ranks_left();
  [[noreturn]] void throw_store_lost(const std::exception& error);

  c10::intrusive_ptr<c10d::Store> store_;
  int32_t rank_ = 0, num_ranks_ = 0;
  pid_t process_;
  std::mutex mutex_;
  std::string first_error_;  // the first that this rank knows of; empty: none
  bool has_left_ = false;
  struct Group {
    std::weak_ptr<WatchedGroup> group;
    std::shared_ptr<std::atomic<int64_t>> num_calls_begun;
  };
  std::array<Group, kMaxGroups> groups_;
  std::atomic<size_t> num_groups_ = 0;
};

}  // namespace knapformer
