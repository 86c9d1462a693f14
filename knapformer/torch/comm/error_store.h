// The error store: how an error on one rank soon becomes an error on all.
//
// A rank that raises leaves its peers waiting in a collective that it will not join. Without this they would wait for
// the group's timeout and learn nothing. So a rank that raises first posts its message in the group's store, and a rank
// that has waited for a moment looks there (watchdog.h). A step without errors and long waits does not ask the store.
#pragma once

#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace knapformer {

/// One per balancer. Thread-safe. The first error that any rank posts stands; the balancer is of no use after it.
class ErrorStore {
 public:
  /// `store`: shared by all ranks, with keys of this balancer alone.
  ErrorStore(c10::intrusive_ptr<c10d::Store> store, int32_t rank) : store_(std::move(store)), rank_(rank) {}

  /// Tells the other ranks of an error of this one. Never throws: there is an error to raise already.
  void post(const std::exception& error) noexcept;
  /// Throws what another rank posted, as that rank's kind of error and with its name. Asks the store.
  void check();
  /// Throws StateError where this rank has posted or found an error before. Does not ask the store.
  void check_usable();

  /// A note of this rank for the others: why it will raise later, or in which call it waits.
  void leave_note(std::string_view name, const std::string& note);
  /// Nothing where `rank` has left none.
  std::optional<std::string> note_of(int32_t rank, std::string_view name);

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
  std::string first_error_;  // that this rank knows of; empty: none
};

}  // namespace knapformer
