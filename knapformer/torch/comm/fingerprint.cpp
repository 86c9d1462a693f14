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
constexpr const char* kGradients = "gradients";
constexpr const char* kNumCome = "count";
constexpr const char* kLastAnnounced = "last_announced";  // of all calls
constexpr const char* kNumGone = "num_gone";              // how many ranks' objects have ended
// For each call in which ranks without rows listen: what the speaker said (its number, a space, how many listen, a
// space, its gradients, a line's end, its fields), and how many ranks have heard it. The last one to hear it removes
// both.
constexpr const char* kSpoken = "spoken";
constexpr const char* kNumHeard = "num_heard";

constexpr std::ptrdiff_t kKeptCalls = 16384;  // at least: more than a step has
constexpr size_t kMaxMatch = 256;             // calls that are compared to find where ranks are in a step

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

/// A line for each tensor. The last lines of `fields` are the tensors'.
std::string gradient_lines(const std::string& fields, const std::string& gradients) {
  const std::vector<std::string> names = names_of(fields);
  const size_t first_tensor = names.size() - gradients.size();
  std::string lines;
  for (size_t i = 0; i < gradients.size(); ++i) {
    lines += text(names[first_tensor + i], ".requires_grad\t", gradients[i] == '1' ? "True" : "False", "\n");
  }
  return lines;
}

}  // namespace

std::string Fingerprint::announced() const {
  if (step == 0) return fields;
  return std::string(fields).insert(fields.find('\n') + 1, text("step\tnumber ", step, "\n"));
}

CallFingerprints::CallFingerprints(c10::intrusive_ptr<c10d::Store> store, RankInGroup place,
                                   std::chrono::milliseconds timeout, std::shared_ptr<Watchdog> watchdog)
    : WatchedGroup(place), store_(std::move(store)), timeout_(timeout), watchdog_(std::move(watchdog)) {
  if (place.num_ranks > 1) calls_.reserve(2 * kKeptCalls);
}

CallFingerprints::~CallFingerprints() {
  if (place_.num_ranks == 1 || process_ != ::getpid()) return;
  try {
    if (store_->add(kNumGone, 1) < place_.num_ranks) return;
    for (const char* name : {kLastAnnounced, kNumGone}) store_->deleteKey(name);
    erase_call(last_announced_);
    erase_call(num_calls_);  // a call that not all ranks came to
    for (const char* name : {kSpoken, kNumHeard}) store_->deleteKey(key(num_calls_, name));
  } catch (...) {  // NOLINT: a store that is gone
  }
}

void CallFingerprints::erase_call(int64_t call) {
  if (call < 0) return;
  for (const char* name : {kFields, kGradients, kNumCome}) store_->deleteKey(key(call, name));
}

bool CallFingerprints::predicts_fields(const Fingerprint& own) const {
  const Kind* next = predicted();
  return next != nullptr && next->steps_away == steps_away(own) && next->fields == own.fields;
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

void CallFingerprints::remember(const Fingerprint& own, bool as_predicted) {
  const Kind* kind = predicted();
  if (!as_predicted) {
    const int64_t away = steps_away(own);
    kind = &kinds_.try_emplace(text(away, own.fields, own.gradients), own.fields, own.gradients, away).first->second;
  }
  calls_.push_back({kind, own.step});
  next_ = as_predicted ? next_ + 1 : after_longest_match();
  if (calls_.size() < 2 * kKeptCalls) return;
  calls_.erase(calls_.begin(), calls_.begin() + kKeptCalls);
  next_ -= std::min<size_t>(next_, kKeptCalls);
}

const std::string* CallFingerprints::made_in_this_step(const Fingerprint& own) const {
  const auto has_all = [](char digit, char of_own) { return ((of_own - '0') & ~(digit - '0')) == 0; };
  const std::string *last = nullptr, *with_all = nullptr;
  for (size_t i = calls_.size(); i-- > 0;) {
    const Kind& made = *calls_[i].kind;
    if (calls_[i].step != own.step || made.fields != own.fields) continue;
    if (made.gradients == own.gradients) return &made.gradients;
    if (last == nullptr) last = &made.gradients;
    if (with_all == nullptr && std::ranges::equal(made.gradients, own.gradients, has_all)) with_all = &made.gradients;
  }
  return with_all != nullptr ? with_all : last;
}

void CallFingerprints::agree(const Fingerprint& own) {
  const std::lock_guard lock(mutex_);
  const bool as_predicted = predicts_fields(own) && predicted()->gradients == own.gradients;
  if (!as_predicted && place_.num_ranks > 1) announce(own);
  remember(own, as_predicted);
  *num_calls_begun_ = ++num_calls_;
}

std::string CallFingerprints::gradients_of_speaker(const Fingerprint& own, Listening listening, bool may_repeat) {
  const std::lock_guard lock(mutex_);
  const bool listens = listening.part == Listening::kListens;
  const std::string* made = may_repeat ? made_in_this_step(own) : nullptr;
  if (made != nullptr) return listens ? *made : own.gradients;
  if (listens) return listen(own);
  if (listening.part == Listening::kSpeaks) {
    store_->set(key(num_calls_, kSpoken),
                text(place_.number(), ' ', listening.num_listeners, ' ', own.gradients, '\n', own.announced()));
  }
  return own.gradients;
}

std::string CallFingerprints::listen(const Fingerprint& own) {
  *num_calls_begun_ = num_calls_ + 1;
  // Where this call is not as predicted, ranks that go ahead in the predicted one must find out.
  const bool is_known = predicts_fields(own);
  if (!is_known) say_fields(own);
  const std::string spoken = key(num_calls_, kSpoken), said = key(num_calls_, kFields);
  await(own, [&] {
    if (store_->check({spoken})) return true;
    if (is_known && store_->check({said})) say_fields(own);  // the speaker may have announced another call
    return false;
  });
  const Said from = parse_said(store_->get_to_str(spoken));
  const size_t begin = from.text.find(' ') + 1, end = from.text.find('\n');
  if (const std::string fields = from.text.substr(end + 1); fields != own.announced()) {
    throw_mismatch(own, from.rank, fields);
  }
  const int32_t num_listeners = std::stoi(from.text);
  const bool is_last = num_listeners == 1 || store_->add(key(num_calls_, kNumHeard), 1) == num_listeners;
  if (is_last) store_->deleteKey(spoken);
  if (is_last && num_listeners > 1) store_->deleteKey(key(num_calls_, kNumHeard));
  return from.text.substr(begin, end - begin);
}

void CallFingerprints::enter_step(int64_t step) {
  const std::lock_guard lock(mutex_);
  step_ = step;
}

void CallFingerprints::say_fields(const Fingerprint& own) {
  const Said first = say_first(*store_, key(num_calls_, kFields), place_.number(), own.announced());
  if (first.text != own.announced()) throw_mismatch(own, first.rank, first.text);
  store_->set(kLastAnnounced, std::to_string(num_calls_));
}

void CallFingerprints::announce(const Fingerprint& own) {
  const int64_t call = num_calls_;
  *num_calls_begun_ = call + 1;
  say_fields(own);
  const Said gradients = say_first(*store_, key(call, kGradients), place_.number(), own.gradients);
  if (gradients.text != own.gradients) throw_mismatch(own, gradients.rank, own.announced(), gradients.text);
  if (store_->add(key(call, kNumCome), 1) == place_.num_ranks) {
    // All ranks are here, so all have read what was announced before.
    erase_call(last_announced_);
  } else {
    await(own, [&] { return store_->add(key(call, kNumCome), 0) == place_.num_ranks; });
  }
  last_announced_ = call;
}

void CallFingerprints::await(const Fingerprint& own, const std::function<bool()>& is_here) {
  const std::string name = value_of("call", own.fields);
  const auto give_up = std::chrono::steady_clock::now() + timeout_;
  std::chrono::microseconds pause(100);
  watchdog_->wait(name, [&](std::chrono::milliseconds patience) {
    for (const auto look = std::chrono::steady_clock::now() + patience; std::chrono::steady_clock::now() < look;
         std::this_thread::sleep_for(pause)) {
      if (is_here()) return true;
      watchdog_->check_errors();
      if (std::chrono::steady_clock::now() > give_up) {
        const std::string absent = watchdog_->absent_ranks(*this);
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

void CallFingerprints::throw_mismatch(const Fingerprint& own, int32_t other_rank, const std::string& fields,
                                      const std::string& gradients) const {
  const std::string call = value_of("call", own.fields);
  const bool same_fields = own.announced() == fields;
  const std::string own_lines = same_fields ? gradient_lines(fields, own.gradients) : own.announced();
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
  Fingerprint own("an earlier call");
  if (const auto ago = static_cast<size_t>(num_calls_ - call); ago <= calls_.size()) {
    const auto& [kind, step] = calls_[calls_.size() - ago];
    own.fields = kind->fields;
    own.gradients = kind->gradients;
    own.step = step;
  }
  const Said said = parse_said(store_->get_to_str(key(call, kFields)));
  if (said.text != own.announced() || !store_->check({key(call, kGradients)})) {
    throw_mismatch(own, said.rank, said.text, own.gradients);
  }
  const Said gradients = parse_said(store_->get_to_str(key(call, kGradients)));
  throw_mismatch(own, gradients.rank, own.announced(), gradients.text);
}

}  // namespace knapformer
