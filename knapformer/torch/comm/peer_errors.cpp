#include "knapformer/torch/comm/peer_errors.h"

#include <algorithm>
#include <sstream>
#include <thread>
#include <utility>

#include "knapformer/core/util/error.h"
#include "knapformer/core/util/interrupt.h"

namespace knapformer {
namespace {

constexpr std::chrono::milliseconds kFirstLook{200}, kMaxPatience{1000};
constexpr int32_t kMaxNamed = 8;  // ranks in a message
constexpr const char* kPositionNote = "position";
constexpr const char* kNumLeftKey = "num_left";
constexpr const char* kErrorKey = "error";
constexpr char kArgument = 'A', kState = 'S';

}  // namespace

void PeerErrors::post(const std::exception& error) noexcept {
  try {
    {
      const std::lock_guard lock(mutex_);
      if (!first_error_.empty()) return;  // posted or found already
      first_error_ = error.what();
    }
    const char kind = dynamic_cast<const ArgumentError*>(&error) != nullptr ? kArgument : kState;
    store_->compareSet(kErrorKey, "", text(kind, "rank ", rank_, ": ", error.what()));
  } catch (...) {  // NOLINT: a store that is gone must not hide the error itself
  }
}

void PeerErrors::check_errors() {
  if (!store_->check({kErrorKey})) return;
  const std::string entry = store_->get_to_str(kErrorKey);
  const std::string message = entry.substr(1);
  {
    const std::lock_guard lock(mutex_);
    if (first_error_.empty()) first_error_ = message;
  }
  if (entry[0] == kArgument) throw ArgumentError(message);
  throw StateError(message);
}

void PeerErrors::check_usable() {
  const std::lock_guard lock(mutex_);
  if (!first_error_.empty()) {
    throw StateError(
        text("balancer: stopped by an earlier error, expected a new balancer after it (", first_error_, ")"));
  }
}

/// A store that fails has most likely ended with the process that serves it.
void PeerErrors::throw_store_lost(const std::exception& error) {
  const std::lock_guard lock(mutex_);
  const std::string reason = error.what();
  const std::string message =
      text("rank ", rank_, ": lost the group's store, which rank 0 or the launcher serves, expected ",
           "that to live as long as the balancer (", reason.substr(0, reason.find('\n')), ")");
  if (first_error_.empty()) first_error_ = message;
  throw StateError(message);
}

void PeerErrors::watch(const std::shared_ptr<WatchedGroup>& group) {
  KNAPFORMER_ASSERT(num_groups_ < kMaxGroups);
  groups_[num_groups_] = {.group = group, .num_calls_begun = group->num_calls_begun_};
  ++num_groups_;  // last: the planning thread may look at the same time
}

void PeerErrors::leave(bool at_end) noexcept {
  if (num_ranks_ == 0 || process_ != ::getpid() || std::exchange(has_left_, true)) return;
  try {
    Position last{.has_left = true, .call = {}};
    for (size_t i = 0; i < num_groups_; ++i) last.counts[i] = *groups_[i].num_calls_begun;
    show(last);
    if (store_->add(kNumLeftKey, 1) == num_ranks_) {
      for (int32_t rank = 0; rank < num_ranks_; ++rank) {
        for (const char* note : {kPositionNote, kFailureNote}) store_->deleteKey(text(note, '/', rank));
      }
      for (const char* key : {kErrorKey, kNumLeftKey}) store_->deleteKey(key);
    }
    for (int32_t i = 0; i < 20 && at_end && rank_ == 0 && store_->check({kNumLeftKey}); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
  } catch (...) {  // NOLINT: a store that is gone: nobody can read in it
  }
}

void PeerErrors::check_ranks_left() {
  if (!store_->check({kNumLeftKey})) return;
  for (size_t i = 0; i < num_groups_; ++i) {
    const std::shared_ptr<WatchedGroup> here = group(i);
    if (!here) continue;
    for (int32_t j = 0; j < here->place().num_ranks; ++j) {
      const int32_t rank = here->place().number_of(j);
      const std::optional<Position> last = position_of(rank);
      if (!last || !last->has_left || last->counts[i] >= here->num_calls_begun()) continue;
      check_errors();  // a rank that raises posts that before it leaves, maybe in the middle of this look
      throw StateError(text("rank ", rank,
                            ": has left (its balancer or its process has ended), expected it in the call ",
                            "that rank ", rank_, " waits in"));
    }
  }
}

void PeerErrors::leave_note(std::string_view name, const std::string& note) {
  store_->set(text(name, '/', rank_), note);
}

std::optional<std::string> PeerErrors::note_of(int32_t rank, std::string_view name) const {
  const std::string key = text(name, '/', rank);
  if (!store_->check({key})) return std::nullopt;
  return store_->get_to_str(key);
}

std::shared_ptr<WatchedGroup> PeerErrors::group(size_t i) const {
  return i < num_groups_ ? groups_[i].group.lock() : nullptr;
}

PeerErrors::Position PeerErrors::position(const std::string& call) const {
  Position position{.call = call};
  for (size_t i = 0; i < kMaxGroups; ++i) {
    if (const auto alive = group(i)) position.counts[i] = alive->num_calls_begun();
  }
  return position;
}

std::optional<PeerErrors::Position> PeerErrors::position_of(int32_t rank) const {
  const std::optional<std::string> entry = note_of(rank, kPositionNote);
  if (!entry) return std::nullopt;
  std::istringstream in(*entry);
  Position position;
  in >> position.counts[0] >> position.counts[1] >> position.has_left >> std::ws;
  std::getline(in, position.call);
  return position;
}

void PeerErrors::show(const Position& position) {
  const auto& [counts, has_left, call] = position;
  leave_note(kPositionNote, text(counts[0], ' ', counts[1], ' ', has_left ? 1 : 0, ' ', call));
}

void PeerErrors::look() {
  check_errors();
  for (size_t i = 0; i < num_groups_; ++i) {
    if (const auto alive = group(i)) alive->check_announcements();
  }
  check_ranks_left();
}

void PeerErrors::wait(std::string_view label, const Poll& poll, bool in_background) {
  bool shown = false;
  for (auto patience = kFirstLook; !poll(patience); patience = std::min(patience * 2, kMaxPatience)) {
    look();
    check_interrupt();
    if (in_background) continue;
    const Position here = position(std::string(label));
    if (!std::exchange(shown, true)) show(here);
    check_order(here);
  }
  if (!shown) return;
  try {
    show(position(""));
  } catch (const std::exception&) {  // NOLINT: only messages need the position
  }
}

void PeerErrors::check_order(const Position& own) const {
  const std::shared_ptr<WatchedGroup> bag = group(1);
  if (!bag) return;
  for (int32_t i = 0; i < bag->place().num_ranks; ++i) {
    const int32_t rank = bag->place().number_of(i);
    const std::optional<Position> other = i == bag->place().rank ? std::nullopt : position_of(rank);
    if (!other) continue;
    const int64_t ahead_in_all = own.counts[0] - other->counts[0], ahead_in_bag = own.counts[1] - other->counts[1];
    const bool crosswise = (ahead_in_all > 0 && ahead_in_bag < 0) || (ahead_in_all < 0 && ahead_in_bag > 0);
    if (!crosswise) continue;
    throw StateError(text("call: got ", own.call, " on rank ", bag->place().number(), ", expected ",
                          other->call.empty() ? "another call" : other->call, ", as on rank ", rank,
                          ": they would wait for each other"));
  }
}

std::string PeerErrors::absent_ranks(const WatchedGroup& of) const {
  const size_t index = group(0).get() == &of ? 0 : 1;
  std::string names;
  int32_t num_absent = 0;
  for (int32_t i = 0; i < of.place().num_ranks; ++i) {
    const int32_t rank = of.place().number_of(i);
    if (i == of.place().rank) continue;
    const std::optional<Position> position = position_of(rank);
    if (position && position->counts[index] >= of.num_calls_begun()) continue;
    if (++num_absent > kMaxNamed) continue;
    const bool waits = position && !position->call.empty();
    names += text(num_absent == 1 ? "" : ", ", "rank ", rank, " (in ", waits ? position->call : "no call", ")");
  }
  if (num_absent > kMaxNamed) names += text(" and ", num_absent - kMaxNamed, " more");
  return names;
}

}  // namespace knapformer
