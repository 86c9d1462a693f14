#include "knapformer/torch/comm/fingerprint.h"

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "knapformer/core/util/error.h"

namespace knapformer {
namespace {

// For each announced call the store holds what the first rank said (its number, a space, the text), and how many ranks
// have come.
constexpr const char* kFields = "fields";
constexpr const char* kGradients = "gradients";              // of the first rank with rows
constexpr const char* kFollowed = "gradients_without_rows";  // of the first rank without: used where none has any
constexpr const char* kNumCome = "count";
constexpr const char* kLastAnnounced = "last_announced";  // of all calls
constexpr const char* kNumGone = "num_gone";              // how many ranks' objects have ended

std::string key(int64_t call, std::string_view name) { return text(call, '/', name); }

struct Said {
  int32_t rank = 0;
  std::string text;
};

Said parse_said(const std::string& value) {
  const size_t space = value.find(' ');
  return {.rank = std::stoi(value.substr(0, space)), .text = value.substr(space + 1)};
}

/// What the first rank said under this key. The first rank may be this one.
Said say_first(c10d::Store& store, const std::string& key, int32_t rank, const std::string& value) {
  const std::string own = text(rank, ' ', value);
  const std::string first = store.compareSet(key, "", own);
  return parse_said(first.empty() ? own : first);
}

std::string id_of(const Fingerprint& f) { return f.fields + f.gradients; }

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

/// Two lines for each tensor. The last lines of `fields` are the tensors'.
std::string gradient_lines(const std::string& fields, const std::string& gradients) {
  const std::vector<std::string> names = names_of(fields);
  const size_t first_tensor = names.size() - gradients.size();
  std::string lines;
  for (size_t i = 0; i < gradients.size(); ++i) {
    const std::string& name = names[first_tensor + i];
    const int bits = gradients[i] - '0';
    lines += text(name, ".requires_grad\t", (bits & 1) != 0 ? "True" : "False", "\n");
    lines += text(name, ".tangent\t", (bits & 2) != 0 ? "one" : "none", "\n");
  }
  return lines;
}

}  // namespace

CallFingerprints::CallFingerprints(c10::intrusive_ptr<c10d::Store> store, RankInGroup place,
                                   std::chrono::milliseconds timeout, std::shared_ptr<Watchdog> watchdog)
    : WatchedGroup(place), store_(std::move(store)), timeout_(timeout), watchdog_(std::move(watchdog)) {}

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
  for (const char* name : {kFields, kGradients, kFollowed, kNumCome}) store_->deleteKey(key(call, name));
}

const Fingerprint* CallFingerprints::predicted() const {
  const size_t place = calls_.size() - num_last_step_;
  if (place < num_last_step_) return &calls_[place];
  const Fingerprint* before = made_ago(1);
  const auto next = before == nullptr ? followed_by_.end() : followed_by_.find(id_of(*before));
  return next == followed_by_.end() ? nullptr : &next->second;
}

const Fingerprint* CallFingerprints::made_ago(int64_t num_calls) const {
  const auto ago = static_cast<size_t>(num_calls);
  return ago <= calls_.size() ? &calls_[calls_.size() - ago] : nullptr;
}

const Fingerprint* CallFingerprints::predicted(const Fingerprint& own, bool follows) const {
  const Fingerprint* expected = predicted();
  if (expected == nullptr || expected->fields != own.fields) return nullptr;
  if (!follows) return expected->gradients == own.gradients ? expected : nullptr;
  const auto has_all = [](char digit, char of_own) { return ((of_own - '0') & ~(digit - '0')) == 0; };
  return std::ranges::equal(expected->gradients, own.gradients, has_all) ? expected : nullptr;
}

Fingerprint CallFingerprints::resolve(const Fingerprint& own, bool follows) {
  if (const Fingerprint* expected = predicted(own, follows)) return *expected;
  Fingerprint agreed = own;
  if (place_.num_ranks > 1) agreed.gradients = announce(own, follows);
  return agreed;
}

void CallFingerprints::agree(const Fingerprint& own) {
  const std::lock_guard lock(mutex_);
  Fingerprint agreed = announced_ == own ? own : resolve(own, /*follows=*/false);
  announced_.reset();
  if (const Fingerprint* before = made_ago(1)) followed_by_[id_of(*before)] = agreed;
  gradients_of_[agreed.fields] = agreed.gradients;
  calls_.push_back(std::move(agreed));
  *num_calls_begun_ = ++num_calls_;
}

std::string CallFingerprints::gradients_of_others(const Fingerprint& own) {
  const std::lock_guard lock(mutex_);
  if (const Fingerprint* expected = predicted(own, /*follows=*/true)) return expected->gradients;
  const bool may_be_recomputed = torch::autograd::get_current_graph_task_id() >= 0;
  const auto before = gradients_of_.find(own.fields);
  if (may_be_recomputed && before != gradients_of_.end()) return before->second;
  announced_ = resolve(own, /*follows=*/true);
  return announced_->gradients;
}

void CallFingerprints::begin_step() {
  const std::lock_guard lock(mutex_);
  if (calls_.size() == num_last_step_) return;
  calls_.erase(calls_.begin(), calls_.begin() + static_cast<std::ptrdiff_t>(num_last_step_));
  num_last_step_ = calls_.size();
}

std::string CallFingerprints::announce(const Fingerprint& own, bool follows) {
  const int64_t call = num_calls_;
  *num_calls_begun_ = call + 1;
  const Said first = say_first(*store_, key(call, kFields), place_.number(), own.fields);
  if (first.text != own.fields) throw_mismatch(own, first.rank, first.text);
  Said gradients = say_first(*store_, key(call, follows ? kFollowed : kGradients), place_.number(), own.gradients);
  if (!follows && gradients.text != own.gradients) {
    throw_mismatch(own, gradients.rank, own.fields, gradients.text);
  }
  store_->set(kLastAnnounced, std::to_string(call));
  if (store_->add(key(call, kNumCome), 1) == place_.num_ranks) {
    // All ranks are here, so all have read what was announced before.
    erase_call(last_announced_);
  } else {
    await_all(call, value_of("call", own.fields));
  }
  last_announced_ = call;
  const std::string by_rows = key(call, kGradients);
  if (follows && store_->check({by_rows})) gradients = parse_said(store_->get_to_str(by_rows));
  return gradients.text;
}

void CallFingerprints::await_all(int64_t call, const std::string& name) {
  const auto give_up = std::chrono::steady_clock::now() + timeout_;
  std::chrono::microseconds pause(100);
  watchdog_->wait(name, [&](std::chrono::milliseconds patience) {
    for (const auto look = std::chrono::steady_clock::now() + patience; std::chrono::steady_clock::now() < look;
         std::this_thread::sleep_for(pause)) {
      if (store_->add(key(call, kNumCome), 0) == place_.num_ranks) return true;
      watchdog_->check_errors();
      if (std::chrono::steady_clock::now() > give_up) {
        const std::string absent = watchdog_->absent_ranks(*this);
        throw StateError(text(name, ": rank ", place_.number(), " waited ",
                              std::chrono::duration_cast<std::chrono::seconds>(timeout_).count(),
                              " s, the group's timeout, for ", absent.empty() ? "the other ranks" : absent,
                              " to come to the same call"));
      }
      pause = std::min<std::chrono::microseconds>(pause * 2, std::chrono::milliseconds(10));
    }
    return false;
  });
}

void CallFingerprints::throw_mismatch(const Fingerprint& own, int32_t other_rank, const std::string& fields,
                                      const std::string& gradients) const {
  const std::string call = value_of("call", own.fields);
  const bool same_fields = own.fields == fields;
  const std::string own_lines = same_fields ? gradient_lines(fields, own.gradients) : own.fields;
  const std::string other_lines = same_fields ? gradient_lines(fields, gradients) : fields;
  for (const std::string& name : names_of(own_lines + other_lines)) {
    std::string got = value_of(name, own_lines), expected = value_of(name, other_lines);
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
  const Fingerprint* made = made_ago(num_calls_ - call);
  const Fingerprint own = made != nullptr ? *made : Fingerprint("a call of an earlier step");
  const Said said = parse_said(store_->get_to_str(key(call, kFields)));
  if (said.text != own.fields || !store_->check({key(call, kGradients)})) {
    throw_mismatch(own, said.rank, said.text, own.gradients);
  }
  const Said gradients = parse_said(store_->get_to_str(key(call, kGradients)));
  throw_mismatch(own, gradients.rank, own.fields, gradients.text);
}

}  // namespace knapformer
