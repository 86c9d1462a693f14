// The error board: how an error on one rank becomes an error on all, soon.
//
// A rank that raises leaves its peers waiting in a collective that it will not join; without this they would wait for
// the group's timeout, and learn nothing. So it posts its message in the group's store first, and a rank that has
// waited for a moment looks there. In a step without errors or long waits the store is not asked.
#pragma once

#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace knapformer {

/// One a balancer. Thread-safe. The first error posted by any rank stands; after it the balancer is of no more use.
class ErrorBoard {
 public:
  /// `store`: of all ranks, and this balancer's alone. Null for one rank alone: then nothing is kept.
  ErrorBoard(c10::intrusive_ptr<c10d::Store> store, int32_t rank) : store_(std::move(store)), rank_(rank) {}

  /// Tells the other ranks of an error of this one. Never throws: there is an error to raise already.
  void post(const std::exception& error) noexcept;
  /// Throws what another rank posted, if any did, as that rank's kind of error and with its name. Asks the store.
  void check();
  /// Leaves why this rank will raise later, for the ranks that it tells so. Not an error yet.
  void leave_reason(const std::string& reason);
  /// What `rank` left.
  std::string reason_of(int32_t rank);
  /// Leaves where this rank waits (lookout.h), and reads where another said that it does, if it ever did.
  void leave_place(const std::string& place);
  std::optional<std::string> place_of(int32_t rank);
  /// Throws StateError where an error was posted or found by this rank before. Does not ask the store.
  void check_usable();

  /// Runs `call`; posts what it throws.
  template <class Call>
  decltype(auto) guard(Call call) {
    try {
      return call();
    } catch (const std::exception& error) {
      post(error);
      throw;
    }
  }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
  int32_t rank_ = 0;
  std::mutex mutex_;
  std::string first_error_;  // of this rank's knowledge; empty: none
};

}  // namespace knapformer
