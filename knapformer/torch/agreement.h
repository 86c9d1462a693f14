// Agreement: ranks make sure that they are in the same call, with tensors of the same kind, before bytes fly.
//
// The plan fixes how many rows travel; dtypes, trailing shapes, the number of features and the order of calls are each
// rank's own say. Were ranks to differ in one, the all-to-all's splits would not match: Gloo ends the process then.
//
// So every call states what it is about to do. Calls repeat from step to step, hence each rank foresees the statement:
// the one at this place of the previous step, or else the one that followed the last statement before. All ranks
// foresee the same, since all they foresee from was agreed. A rank whose statement is as foreseen goes ahead: nothing
// is exchanged, and that is the steady state. A rank whose statement differs announces it in the group's store, and
// waits until all ranks have announced the same. A rank that went ahead while another announces finds out when it has
// waited for a moment.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <unordered_map>
#include <vector>

#include "knapformer/torch/lookout.h"
#include "knapformer/torch/statement.h"

namespace knapformer {

/// A rank of a group whose ranks have consecutive numbers in a larger one.
struct RankOf {
  int32_t rank = 0, num_ranks = 1;
  int32_t first_number = 0;
};

/// For one group of one balancer. Throws, and leaves it to the caller to post that on the board. Thread-safe, though
/// calls of a group must have one order anyway.
class Agreement {
 public:
  /// store: of all ranks of the group, for this agreement alone. timeout: how long to wait for other ranks'
  /// announcements.
  Agreement(c10::intrusive_ptr<c10d::Store> store, RankOf rank, std::chrono::milliseconds timeout,
            std::shared_ptr<Lookout> lookout);

  int32_t rank() const { return rank_.rank; }
  int32_t num_ranks() const { return rank_.num_ranks; }
  /// Of a rank of the group, in messages and on the error board.
  int32_t number_of(int32_t rank) const { return rank_.first_number + rank; }
  /// Calls that this rank has come to, with the one that it is agreeing on.
  int64_t num_come_to() const { return num_come_to_; }

  /// Agrees on the call that comes next, and on to the one after it. Throws ArgumentError on every rank where ranks
  /// differ. Collective where something is new; all ranks come to the same calls in the same order.
  void agree(const Statement& statement);
  /// Agrees on the call that comes next, without going on: `agree` follows with the same statement, its gradients as
  /// returned here. For ranks that follow. A call that was agreed on before and is not the next is as it was then: it
  /// may belong to a computation that is repeated without its exchanges (activation checkpointing).
  std::string foresee(const Statement& statement);
  /// A new step: places are counted from its beginning.
  void begin_step();

  /// For a rank that waits: throws where others have announced a call that this rank took as foreseen.
  void check_announcements();

 private:
  using StatementId = int32_t;
  static constexpr StatementId kNone = -1;

  struct Known {
    std::string fields;
    std::string gradients;
  };

  StatementId foreseen() const;
  StatementId statement_ago(int64_t calls_ago) const;
  StatementId resolve(const Statement& statement);
  StatementId announce(const Statement& statement);
  StatementId intern(std::string fields, std::string gradients);
  bool matches(StatementId id, const Statement& statement) const;
  void await_all(int64_t call, const std::string& name);
  [[noreturn]] void throw_mismatch(const std::string& own, int32_t other_rank, const std::string& other) const;
  std::string key(int64_t call, std::string_view name) const;

  c10::intrusive_ptr<c10d::Store> store_;
  RankOf rank_;
  int32_t number_ = 0;  // of this rank
  std::chrono::milliseconds timeout_;
  std::shared_ptr<Lookout> lookout_;

  std::mutex mutex_;
  std::vector<Known> known_;
  std::unordered_map<std::string, StatementId> ids_;
  std::unordered_map<std::string, StatementId> last_of_;  // of each statement's fields
  std::vector<StatementId> followed_by_;                  // of each statement, what came after it last
  std::vector<StatementId> last_step_, step_;             // statements by place
  StatementId last_ = kNone;
  std::optional<StatementId> resolved_;  // of the call that comes next, by foresee
  int64_t num_calls_ = 0;
  std::atomic<int64_t> num_come_to_ = 0;  // num_calls_, or one more
  int64_t last_announced_ = -1;           // the last call that this rank announced
};

}  // namespace knapformer
