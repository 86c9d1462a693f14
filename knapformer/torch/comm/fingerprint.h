// Call fingerprints: ranks make sure that they are in the same call, with tensors of the same kind, before bytes fly.
//
// The plan fixes how many rows travel. Dtypes, trailing shapes, the number of features and the order of calls are up to
// each rank. Were ranks to differ in one, the all-to-all's splits would not match, and Gloo ends the process then.
//
// So every call has a fingerprint, which says what the rank is about to do. Steps repeat, so each rank predicts the
// next fingerprint: the one at this place of the step before, or else the one that last followed the present one. All
// ranks predict the same, since they predict from what they agreed on. A rank whose call is as predicted goes ahead:
// nothing is exchanged in the steady state. A rank whose call is not announces it in the group's store, and waits until
// all ranks have announced the same. A rank that went ahead while another announced finds out when it has waited for a
// moment (watchdog.h).
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
  /// A digit for each tensor, of which derivatives travel: 1 for its gradient, 2 for its tangent, or their sum.
  std::string gradients;
};

/// The calls of one group of one balancer. What it throws is the caller's to post. Thread-safe, though the calls of a
/// group must have one order anyway.
class CallFingerprints final : public WatchedGroup {
 public:
  /// store: shared by the group's ranks, for this object alone. timeout: how long to wait for announcements of others.
  CallFingerprints(c10::intrusive_ptr<c10d::Store> store, RankInGroup place, std::chrono::milliseconds timeout,
                   std::shared_ptr<Watchdog> watchdog);
  /// Of the last rank to come here: takes the group's keys out of the store.
  ~CallFingerprints() override;

  /// Agrees on the next call and counts it. Throws ArgumentError on every rank where ranks differ, StateError where
  /// they are in different calls. Collective where the call is not as predicted.
  void agree(const Fingerprint& own);
  /// For a rank without rows, before `agree` on the same call: the gradients that travel on the other ranks; where no
  /// rank has rows, those of one of them. A call that is not as predicted but was agreed on before is as it was then:
  /// activation checkpointing may repeat it without its exchange. Collective where the call is new.
  std::string gradients_of_others(const Fingerprint& own);
  /// A new step: places are counted from here.
  void begin_step();
  void check_announcements() override;

 private:
  const Fingerprint* predicted() const;
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

  std::recursive_mutex mutex_;      // a rank that waits for announcements looks for others meanwhile
  std::vector<Fingerprint> calls_;  // of the step before, and of this one
  size_t num_last_step_ = 0;        // how many of these are of the step before
  std::unordered_map<std::string, Fingerprint> followed_by_;   // of each fingerprint, what came after it last
  std::unordered_map<std::string, std::string> gradients_of_;  // of each call's fields, as agreed on last
  std::optional<Fingerprint> announced_;                       // the next call, where it was announced already
  int64_t num_calls_ = 0;
  int64_t last_announced_ = -1;  // the last call that this rank announced
};

}  // namespace knapformer
