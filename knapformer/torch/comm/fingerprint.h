// Call fingerprints: ranks make sure that they are in the same call, with tensors of the same kind, before data moves.
//
// The plan fixes how many rows travel. Dtypes, trailing shapes, the number of features and the order of calls are up to
// each rank. If ranks differed in one of these, the all-to-all's splits would not match, and Gloo would end the
// process.
//
// So every call has a fingerprint, which says what the rank is about to do. Steps repeat, so each rank predicts the
// next fingerprint: the one at this place of the step before, or else the one that last followed the previous call's.
// All ranks predict the same, since they predict from what they agreed on. A rank whose call is as predicted goes
// ahead: nothing is exchanged in the steady state. A rank whose call is not as predicted announces it in the group's
// store, and waits until all ranks have announced the same call. A rank that went ahead while another announced a call
// finds out when it has waited for a moment (watchdog.h).
#pragma once

#include <unistd.h>

#include <chrono>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <unordered_map>
#include <vector>

#include "knapformer/torch/comm/watchdog.h"

namespace knapformer {

/// What a rank is about to do.
struct Fingerprint {
  Fingerprint() = default;
  explicit Fingerprint(std::string_view call) { add("call", call); }

  void add(std::string_view name, std::string_view value) {
    fields.append(name).append("\t").append(value).append("\n");
  }
  bool operator==(const Fingerprint&) const = default;

  /// Lines "name\tvalue\n" that all ranks must share: the call, its options, and last a line for each tensor.
  std::string fields;
  /// A digit for each tensor says which of its derivatives travel: 1 for its gradient, 2 for its tangent, or their sum.
  std::string gradients;
};

/// The calls of one group of one balancer. The caller posts what it throws. Thread-safe, although the calls of a group
/// must have one order anyway.
class CallFingerprints final : public WatchedGroup {
 public:
  /// store: shared by the group's ranks, for this object alone. timeout: how long to wait for announcements of others.
  CallFingerprints(c10::intrusive_ptr<c10d::Store> store, RankInGroup place, std::chrono::milliseconds timeout,
                   std::shared_ptr<Watchdog> watchdog);
  /// The last rank to come here removes the group's keys from the store.
  ~CallFingerprints() override;

  /// Agrees on the next call and counts it. Throws ArgumentError on every rank where ranks differ, StateError where
  /// they are in different calls. Collective where the call is not as predicted.
  void agree(const Fingerprint& own);
  /// For a rank without rows, before `agree` on the same call: the gradients that travel on the other ranks; where no
  /// rank has rows, those of one of them. Collective where the call is not as predicted, except in a backward pass:
  /// there activation checkpointing may repeat a call without its exchange, so it returns what was agreed on last.
  std::string gradients_of_others(const Fingerprint& own);
  /// Begins a new step: places are counted from here.
  void begin_step();
  void check_announcements() override;

 private:
  const Fingerprint* predicted() const;
  /// Null where the call is not as predicted. A rank without rows follows the prediction, unless its own tensors have
  /// more gradients than that: then those of the others, which went through the same layers, will have them too.
  const Fingerprint* predicted(const Fingerprint& own, bool follows) const;
  const Fingerprint* made_ago(int64_t num_calls) const;
  Fingerprint resolve(const Fingerprint& own, bool follows);
  void erase_call(int64_t call);
  std::string announce(const Fingerprint& own, bool follows);
  void await_all(int64_t call, const std::string& name);
  /// Names the first line that differs from the other rank's; where none does, the first gradient.
  [[noreturn]] void throw_mismatch(const Fingerprint& own, int32_t other_rank, const std::string& fields,
                                   const std::string& gradients = "") const;

  c10::intrusive_ptr<c10d::Store> store_;
  std::chrono::milliseconds timeout_;
  pid_t process_ = ::getpid();
  std::shared_ptr<Watchdog> watchdog_;

  std::recursive_mutex mutex_;      // recursive: a wait for announcements checks for others, too
  std::vector<Fingerprint> calls_;  // of the step before, and of this one
  size_t num_last_step_ = 0;        // how many of these are of the step before
  std::unordered_map<std::string, Fingerprint> followed_by_;   // by fingerprint, what came after it last
  std::unordered_map<std::string, std::string> gradients_of_;  // by a call's fields, as agreed on last
  std::optional<Fingerprint> announced_;                       // the next call, where it was announced already
  int64_t num_calls_ = 0;
  int64_t last_announced_ = -1;  // the last call that this rank announced
};

}  // namespace knapformer
