#include "knapformer/torch/comm/fingerprint.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "knapformer/core/util/error.h"

namespace knapformer {
namespace {

// For each announced call the store holds what the first rank said (its number, a space, the text), and how many ranks
// have come.
constexpr const char* kFields = "fields";
constexpr const char* kNumCome = "count";
constexpr const char* kLastAnnounced = "last_announced";  // of all calls
constexpr const char* kNumGone = "num_gone";              // how many ranks' objects have ended

constexpr std::ptrdiff_t kKeptCalls = 16384;  // at least: more than a step has
constexpr size_t kMaxMatch = 256;             // calls that are compared to find where ranks are in a step

std::string key(int64_t call, std::string_view name) { return text(call, '/', name); }

/// The rank, and its text.
std::pair<int32_t, std::string> parse_said(const std::string& value) {
  const size_t space = value.find(' ');
  return {std::stoi(value.substr(0, space)), value.substr(space + 1)};
}

std::vector<std::string> names_of(const std::string& fields) {
  std::vector<std::string> names;
  for (size_t begin = 0; begin < fields.size(); begin = fields.find('\n', begin) + 1)
    names.push_back(fields.substr(begin, fields.find('\t', begin) - begin));
  return names;
}

std::string value_of(const std::string& name, const std::string& fields) {
  const std::string lines = "\n" + fields, start = "\n" + name + "\t";
  const size_t found = lines.find(start), begin = found + start.size();
  return found == std::string::npos ? "none" : lines.substr(begin, lines.find('\n', begin) - begin);
}

}  // namespace

std::string Fingerprint::announced() const {
  if (step == 0) return fields;
  return std::string(fields).insert(fields.find('\n') + 1, text("step\tnumber ", step, "\n"));
}

CallFingerprints::CallFingerprints(c10::intrusive_ptr<c10d::Store> store, RankInGroup place,
                                   std::chrono::milliseconds timeout, std::shared_ptr<PeerErrors> peer_errors)
    : WatchedGroup(place), store_(std::move(store)), timeout_(timeout), peer_errors_(std::move(peer_errors)) {
  if (place.num_ranks > 1) calls_.reserve(2 * kKeptCalls);
}

CallFingerprints::~CallFingerprints() {
  if (place_.num_ranks == 1 || process_ != ::getpid()) return;
  try {
    if (store_->add(kNumGone, 1) < place_.num_ranks) return;
    for (const char* name : {kLastAnnounced, kNumGone}) store_->deleteKey(name);
    erase_call(last_announced_);
    erase_call(num_calls_);  // a call that not all ranks came to
  } catch (...) {            // NOLINT: a store that is gone
  }
}

void CallFingerprints::erase_call(int64_t call) {
  if (call < 0) return;
  for (const char* name : {kFields, kNumCome}) store_->deleteKey(key(call, name));
}

size_t CallFingerprints::after_longest_match() const {
  const size_t end = calls_.size();
  size_t found = end, longest = 0;
  for (size_t begin = end - 1; begin > 0 && longest < kMaxMatch; --begin) {  // calls before `begin` against the last
    size_t length = 0;
    while (length < std::min(begin, kMaxMatch) && calls_[begin - 1 - length].kind == calls_[end - 1 - length].kind)
      ++length;
    if (length > longest) found = begin, longest = length;
  }
  return found;
}

void CallFingerprints::agree(const Fingerprint& own) {
  const std::lock_guard lock(mutex_);
  const int64_t steps_away = own.step == 0 ? 0 : own.step - step_;
  const Kind* kind = next_ < calls_.size() ? calls_[next_].kind : nullptr;
  const bool as_predicted = kind != nullptr && kind->steps_away == steps_away && kind->fields == own.fields;
  if (!as_predicted) {
    if (place_.num_ranks > 1) announce(own);
    kind = &*kinds_.insert({own.fields, steps_away}).first;
  }
  calls_.push_back({kind, own.step});
  next_ = as_predicted ? next_ + 1 : after_longest_match();
  if (calls_.size() >= 2 * kKeptCalls) {
    calls_.erase(calls_.begin(), calls_.begin() + kKeptCalls);
    next_ -= std::min<size_t>(next_, kKeptCalls);
  }
  *num_calls_begun_ = ++num_calls_;
}

void CallFingerprints::enter_step(int64_t step) {
  const std::lock_guard lock(mutex_);
  step_ = step;
}

void CallFingerprints::announce(const Fingerprint& own) {
  const int64_t call = num_calls_;
  *num_calls_begun_ = call + 1;
  const std::string said = text(place_.number(), ' ', own.announced());
  const std::string first = store_->compareSet(key(call, kFields), "", said);  // the first rank may be this one
  if (!first.empty() && first != said) {
    const auto [rank, fields] = parse_said(first);
    if (fields != own.announced()) throw_mismatch(own, rank, fields);
  }
  store_->set(kLastAnnounced, std::to_string(call));
  if (store_->add(key(call, kNumCome), 1) == place_.num_ranks) {
    // All ranks are here, so all have read what was announced before.
    erase_call(last_announced_);
  } else {
    await_others(own);
  }
  last_announced_ = call;
}

void CallFingerprints::await_others(const Fingerprint& own) {
  const std::string name = value_of("call", own.fields);
  const auto give_up = std::chrono::steady_clock::now() + timeout_;
  std::chrono::microseconds pause(100);
  peer_errors_->wait(name, [&](std::chrono::milliseconds patience) {
    for (const auto look = std::chrono::steady_clock::now() + patience; std::chrono::steady_clock::now() < look;
         std::this_thread::sleep_for(pause)) {
      if (store_->add(key(num_calls_, kNumCome), 0) == place_.num_ranks) return true;
      peer_errors_->check_errors();
      if (std::chrono::steady_clock::now() > give_up) {
        const std::string absent = peer_errors_->absent_ranks(*this);
        throw StateError(text(name, ": rank ", place_.number(), " waited ",
                              std::chrono::duration_cast<std::chrono::seconds>(timeout_).count(),
                              " s, the group's timeout, for ", absent.empty() ? "the other ranks" : absent,
                              " to come to the same call"));
      }
      pause = std::min<std::chrono::microseconds>(pause + pause / 4, std::chrono::milliseconds(10));
    }
    return false;
  });
}

void CallFingerprints::throw_mismatch(const Fingerprint& own, int32_t other_rank, const std::string& fields) const {
  const std::string call = value_of("call", own.fields), own_fields = own.announced();
  for (const std::string& name : names_of(own_fields + fields)) {
    std::string got = value_of(name, own_fields), expected = value_of(name, fields);
    if (got == expected) continue;
    // The lower rank's value is the expected one, so that both ranks say the same, whoever announced first.
    int32_t got_rank = place_.number(), expected_rank = other_rank;
    if (got_rank < expected_rank) {
      std::swap(got, expected);
      std::swap(got_rank, expected_rank);
    }
    const std::string message =
        text(name, ": got ", got, " on rank ", got_rank, ", expected ", expected, ", as on rank ", expected_rank);
    if (name == "call") throw StateError(message);
    throw ArgumentError(text(call, ": ", message));
  }
  throw StateError(text(call, ": rank ", other_rank, " announced it, and rank ", place_.number(), " did not"));
}

void CallFingerprints::check_announcements() {
  if (place_.num_ranks == 1) return;
  const std::lock_guard lock(mutex_);
  if (!store_->check({kLastAnnounced})) return;
  const int64_t call = std::stoll(store_->get_to_str(kLastAnnounced));
  if (call <= last_announced_ || call >= num_calls_) return;
  // Another rank announced a call that was as predicted here. Its keys stay: not all ranks came.
  Fingerprint own("an earlier call");
  if (const auto ago = static_cast<size_t>(num_calls_ - call); ago <= calls_.size()) {
    const auto& [kind, step] = calls_[calls_.size() - ago];
    own.fields = kind->fields;
    own.step = step;
  }
  const auto [rank, fields] = parse_said(store_->get_to_str(key(call, kFields)));
  throw_mismatch(own, rank, fields);
}

}  // namespace knapformer
