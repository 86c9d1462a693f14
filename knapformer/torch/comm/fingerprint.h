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
//
// A rank without rows computed nothing, so its tensors do not say which gradients travel. Where the plan shows such a
// rank, one rank with rows posts in the store which, and goes on; the rank without rows waits for that post.
#pragma once

#include <unistd.h>

#include <chrono>
#include <functional>
#include <mutex>
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
  /// A digit for each tensor: 1 where its gradient travels, or 0.
  std::string gradients;
};

/// How the ranks of a group decide which gradients travel in a call: a rank without rows computed nothing, so it
/// listens to one that has rows.
struct Listening {
  enum Part { kNone, kSpeaks, kListens };
  Part part = kNone;
  int32_t num_listeners = 0;  // as the speaker counts them: one that has no rows may not know who else listens
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
  /// Before `agree` on a call in which some rank has no rows: the gradients that travel. The speaker posts its own ones
  /// in the store, for which a rank that listens waits. All ranks of the group come here, or those two kinds alone.
  /// may_repeat: activation checkpointing may run a call of this step again, also without its exchange; then nothing is
  /// posted, and a rank that listens gets what was agreed on: its own gradients, where they were.
  std::string gradients_of_speaker(const Fingerprint& own, Listening listening, bool may_repeat);
  /// Begins a new step: places are counted from here.
  void begin_step();
  void check_announcements() override;

 private:
  const Fingerprint* predicted() const;
  const Fingerprint* made_ago(int64_t num_calls) const;
  /// The gradients of a call of this step with these fields: `own`'s if there was one, or else the last that had all of
  /// them, or else the last. Null where there was no such call.
  const std::string* made_in_this_step(const Fingerprint& own) const;
  void erase_call(int64_t call);
  /// Says which call this rank has come to. Throws where another rank said another one.
  void say_fields(const Fingerprint& own);
  void announce(const Fingerprint& own);
  std::string listen(const Fingerprint& own);
  /// Waits in the next call until `is_here`, up to the group's timeout.
  void await(const Fingerprint& own, const std::function<bool()>& is_here);
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
  std::unordered_map<std::string, Fingerprint> followed_by_;  // by fingerprint, what came after it last
  int64_t num_calls_ = 0;
  int64_t last_announced_ = -1;  // the last call that this rank announced
};

}  // namespace knapformer
