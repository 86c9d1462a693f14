// Call fingerprints: ranks make sure that they are in the same call, with tensors of the same kind, before data moves.
//
// The plan fixes how many rows travel. By which plan's step, dtypes, trailing shapes, the number of features and the
// order of calls are up to each rank. If ranks differed in one of these, the all-to-all's splits would not match, and
// Gloo would end the process.
//
// So every call has a fingerprint, which says what the rank is about to do. Steps repeat, so each rank predicts the
// next fingerprint: the one that followed the longest earlier run of calls equal to the last ones. All ranks predict
// the same, since they predict from what they agreed on. A rank whose call is as predicted goes ahead: nothing is
// exchanged in the steady state. A rank whose call is not as predicted announces it in the group's store, and waits
// until all ranks have announced the same call. A rank that went ahead while another announced a call finds out when it
// has waited for a moment (peer_errors.h).
//
// Steps have numbers, in the order in which ranks plan. A prediction holds how far a call's step is from the one
// planned or followed last (0 unless a step is held): the same in every step.
#pragma once

#include <unistd.h>

#include <chrono>
#include <compare>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "knapformer/torch/comm/peer_errors.h"

namespace knapformer {

/// What a rank is about to do.
struct Fingerprint {
  Fingerprint() = default;
  explicit Fingerprint(std::string_view call, int64_t of_step = 0) : step(of_step) { add("call", call); }

  void add(std::string_view name, std::string_view value) {
    fields.append(name).append("\t").append(value).append("\n");
  }
  /// What ranks announce: the fields, with a line for the step behind the call's.
  std::string announced() const;

  /// Lines "name\tvalue\n" that all ranks must share: the call, its options, its tensors.
  std::string fields;
  /// The number of the plan's step that the call belongs to (RankPlan::number); 0: to none.
  int64_t step = 0;
};

/// The calls of one group of one balancer. The caller posts what it throws. Thread-safe, although the calls of a group
/// must have one order anyway.
class CallFingerprints final : public WatchedGroup {
 public:
  /// store: shared by the group's ranks, for this object alone. timeout: how long to wait for announcements of others.
  CallFingerprints(c10::intrusive_ptr<c10d::Store> store, RankInGroup place, std::chrono::milliseconds timeout,
                   std::shared_ptr<PeerErrors> peer_errors);
  /// The last rank to come here removes the group's keys from the store.
  ~CallFingerprints() override;

  /// Agrees on the next call and counts it. Throws ArgumentError on every rank where ranks differ, StateError where
  /// they are in different calls. Collective where the call is not as predicted.
  void agree(const Fingerprint& own);
  /// The step that ranks planned or followed last, from which those of calls are counted.
  void enter_step(int64_t step);
  void check_announcements() override;

 private:
  /// What repeats of a call.
  struct Kind {
    std::string fields;
    int64_t steps_away = 0;  // from the step that was entered last

    auto operator<=>(const Kind&) const = default;
  };
  struct Call {
    const Kind* kind = nullptr;
    int64_t step = 0;
  };
  /// The call after those that are most like the last ones.
  size_t after_longest_match() const;
  void erase_call(int64_t call);
  void announce(const Fingerprint& own);
  /// Waits in the next call until all ranks are there, up to the group's timeout.
  void await_others(const Fingerprint& own);
  /// Names the first line that differs from the other rank's.
  [[noreturn]] void throw_mismatch(const Fingerprint& own, int32_t other_rank, const std::string& fields) const;

  c10::intrusive_ptr<c10d::Store> store_;
  std::chrono::milliseconds timeout_;
  pid_t process_ = ::getpid();
  std::shared_ptr<PeerErrors> peer_errors_;

  std::recursive_mutex mutex_;  // recursive: a wait for announcements checks for others, too
  std::set<Kind> kinds_;
  std::vector<Call> calls_;  // the last ones
  size_t next_ = 0;          // of these, the one that the next call is predicted to be like
  int64_t step_ = 0;         // entered last
  int64_t num_calls_ = 0;
  int64_t last_announced_ = -1;  // the last call that this rank announced
};

}  // namespace knapformer
