// The lookout: what a rank that waits for others looks at, and where they find it meanwhile.
//
// A rank that has waited for a moment looks for an error of another rank, for an announcement that it missed, and for
// calls that came in another order over the two groups of a balancer, its own and that of the bag. For this each rank
// counts, group by group, the calls that it has come to. Two ranks of a bag that call in the same order are level, or
// one is ahead: nowhere behind the other. A rank that is ahead in one group and behind in the other has called in
// another order, and the two would wait for each other. One exchange of counts tells, however old they are.
//
// Nothing of this happens in a step without long waits.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "knapformer/torch/error_board.h"

namespace knapformer {

class Agreement;

/// One a balancer.
class Lookout {
 public:
  explicit Lookout(std::shared_ptr<ErrorBoard> board) : board_(std::move(board)) {}

  /// First that of the balancer's group, then that of the bag where this is another.
  void watch(std::weak_ptr<Agreement> agreement) { agreements_.push_back(std::move(agreement)); }
  /// Throws what it sees of errors and, in agreements other than `but`, of announcements.
  void look(const Agreement* but = nullptr) const;
  const std::shared_ptr<ErrorBoard>& board() const { return board_; }

 private:
  friend class Wait;
  static constexpr size_t kMostAgreements = 2;
  using Counts = std::array<int64_t, kMostAgreements>;  // of the calls that a rank has come to, by agreement

  std::shared_ptr<Agreement> agreement(size_t i) const;  // null where there is none (any more)
  Counts counts() const;

  std::shared_ptr<ErrorBoard> board_;
  std::vector<std::weak_ptr<Agreement>> agreements_;
};

/// A wait of the thread that makes the calls; on others look_aside alone.
class Wait {
 public:
  /// label: "route(x)", of what is waited for. Outlives the wait.
  Wait(const Lookout& lookout, std::string_view label);

  /// How long to wait before the next look: each time longer, up to a second.
  std::chrono::milliseconds patience() const { return patience_; }
  /// Throws what it sees.
  void look(const Agreement* but = nullptr);
  /// As look, for a thread beside the one that makes the calls: knows nothing of their order.
  void look_aside();
  /// The others have come.
  void end() noexcept;
  /// "rank 1 (in route), rank 3 (in no call)": those that have not come as far as this one in the agreement. May be
  /// empty. Asks the store for each rank: for the message of a failure.
  std::string absent(const Agreement& agreement) const;

 private:
  struct Place {
    Lookout::Counts counts = {};
    std::string call;  // that it waits in; empty: in none
  };
  std::optional<Place> place_of(int32_t rank) const;
  void show(const std::string& call);
  void compare_order() const;

  const Lookout& lookout_;
  std::string_view label_;
  std::chrono::milliseconds patience_;
  bool shown_ = false;
};

}  // namespace knapformer
