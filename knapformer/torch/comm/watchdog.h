// The watchdog: how an error on one rank soon becomes an error on all.
//
// A rank that raises leaves its peers waiting in a collective that it will not join. Without this they would wait for
// the group's timeout and learn nothing. So a rank that raises first posts its message in the group's store (the error
// store). A rank that has waited for a moment looks there; for a call that others announced and this rank took for
// another (fingerprint.h); and for calls in another order. A balancer has two groups, its own and the bag's, so ranks
// may wait for each other crosswise. Each rank counts the calls that it has come to in either group. Of two ranks of a
// bag that call in the same order, one is behind the other in no group. A rank that is ahead in one group and behind in
// the other has called in another order. Counts that are out of date tell it too.
//
// A rank that leaves, because its balancer or its process ends, says to how many calls it came: whoever waits in a
// later one raises. A process that ends without a word is noticed by its lifeline (lifeline.h).
//
// A step without errors and long waits does not ask the store. Where the host runs ahead of an accelerator, a thread of
// its own looks (patrol.h).
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
#include <vector>

#include "knapformer/torch/comm/lifeline.h"
#include "knapformer/torch/comm/patrol.h"

namespace knapformer {

/// This rank in a group whose ranks have consecutive numbers in a larger one, by which messages name them.
struct RankInGroup {
  int32_t rank = 0, num_ranks = 1;
  int32_t first_number = 0;

  int32_t number_of(int32_t other) const { return first_number + other; }
  int32_t number() const { return number_of(rank); }
};

/// A group as the watchdog sees it.
class WatchedGroup {
 public:
  explicit WatchedGroup(RankInGroup place) : place_(place) {}
  virtual ~WatchedGroup() = default;

  /// Throws where others announced a call that this rank took for another.
  virtual void check_announcements() = 0;
  const RankInGroup& place() const { return place_; }
  /// Calls that this rank has come to, with the one that it is in.
  int64_t num_calls_begun() const { return *num_calls_begun_; }

 protected:
  friend class Watchdog;
  RankInGroup place_;
  /// Shared with the watchdog, which outlives the group.
  std::shared_ptr<std::atomic<int64_t>> num_calls_begun_ = std::make_shared<std::atomic<int64_t>>(0);
};

/// One per balancer. The first error that any rank posts stands; the balancer is of no use after it. Errors and notes
/// are thread-safe.
class Watchdog {
 public:
  /// The note that says why this rank will raise later. It stays until the last rank has left, as ranks that lag behind
  /// read it then.
  static constexpr const char* kFailureNote = "failure";

  /// `store`: shared by all ranks, with keys of this balancer alone. num_ranks: 0 for a watchdog that leaves unsaid
  /// when this rank leaves.
  Watchdog(c10::intrusive_ptr<c10d::Store> store, int32_t rank, int32_t num_ranks = 0)
      : store_(std::move(store)), rank_(rank), num_ranks_(num_ranks), process_(::getpid()) {}
  ~Watchdog() { leave(); }
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  /// Three steps by which ranks hold on to each other; between one and the next all ranks have come by.
  void make_lifeline();
  void connect_lifeline() { lifeline_->connect(); }
  void withdraw_lifeline_address() { lifeline_->withdraw_address(); }
  /// Tells the other ranks that this one will come to no more calls. The last to leave takes the balancer's keys out of
  /// the store.
  /// at_end: the process ends, and perhaps the store with it: rank 0 gives the others a second to leave, too.
  void leave(bool at_end = false) noexcept;

  /// Tells the other ranks of an error of this one. Never throws: there is an error to raise already.
  void post(const std::exception& error) noexcept;
  /// The same, of a rank whose process has ended.
  void post_end_of(int32_t rank) noexcept;
  /// Throws what another rank posted, as that rank's kind of error and with its name. Asks the store.
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

  /// A note of this rank for the others: in which call it waits, or kFailureNote.
  void leave_note(std::string_view name, const std::string& note);
  /// Nothing where `rank` has left none.
  std::optional<std::string> note_of(int32_t rank, std::string_view name) const;

  /// First the balancer's group, then the bag's where that is another. abort: ends its collectives in flight.
  void watch(const std::shared_ptr<WatchedGroup>& group, std::function<void()> abort = {});
  /// An accelerator was given a collective that no call waits for: looks from now on while it is in flight.
  void device_works(Patrol::Mark mark);
  /// Waits in `label` ("route(x)") until poll returns true, and looks each time it does not; throws what it sees. poll
  /// gets the time that it may take itself: longer each time, up to a second. in_background: on a thread beside the one
  /// that makes the calls, which knows nothing of their order.
  using Poll = std::function<bool(std::chrono::milliseconds)>;
  void wait(std::string_view label, const Poll& poll, bool in_background = false);
  /// Throws what other ranks have posted and announced.
  void look();
  /// The ranks that have not come as far as this one: "rank 1 (in route), rank 3 (in no call)". For messages: it asks
  /// the store for each rank.
  std::string absent_ranks(const WatchedGroup& group) const;

 private:
  static constexpr size_t kMaxGroups = 2;
  /// Where a rank is, as others see it in the store.
  struct Position {
    std::array<int64_t, kMaxGroups> counts = {};  // calls begun, by group
    std::string call;                             // that the rank waits in; empty: in none
  };
  std::shared_ptr<WatchedGroup> group(size_t i) const;  // null where there is none (any more)
  Position position(const std::string& call) const;
  std::optional<Position> position_of(int32_t rank, std::string_view note) const;
  void show(const Position& position);
  void check_order(const Position& own) const;
  void check_ranks_left();
  [[noreturn]] void throw_store_lost(const std::exception& error);

  c10::intrusive_ptr<c10d::Store> store_;
  int32_t rank_ = 0, num_ranks_ = 0;
  pid_t process_;
  std::mutex mutex_;
  std::string first_error_;  // that this rank knows of; empty: none
  std::string ended_;        // which rank's process has; empty: none
  bool has_left_ = false;
  std::vector<std::weak_ptr<WatchedGroup>> groups_;
  std::vector<std::shared_ptr<std::atomic<int64_t>>> num_calls_begun_;  // of these
  std::vector<std::function<void()>> aborts_;
  // The last members: their threads end first.
  std::unique_ptr<Lifeline> lifeline_;
  std::shared_ptr<Patrol> patrol_;  // from the first collective of an accelerator on
};

/// "route(x,ids)" -> "route".
inline std::string call_name(std::string_view label) { return std::string(label.substr(0, label.find('('))); }

}  // namespace knapformer
