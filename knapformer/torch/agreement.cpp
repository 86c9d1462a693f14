#include "knapformer/torch/agreement.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "knapformer/core/error.h"

namespace knapformer {
namespace {

// Keys of the store. For each call that is announced: what the first rank said (its rank, a space, its statement), how
// many have come, and that all have.
constexpr const char* kFields = "fields";
constexpr const char* kGradients = "gradients";  // of the first rank that has rows
constexpr const char* kFollowed =
    "gradients_without_rows";  // of the first rank that has none: counts where none has any
constexpr const char* kCount = "count";
constexpr const char* kDone = "done";
constexpr const char* kLastAnnounced = "last_announced";  // of the whole agreement

struct Said {
  int32_t rank = 0;
  std::string text;
};

Said parse_said(const std::string& value) {
  const size_t space = value.find(' ');
  return {.rank = std::stoi(value.substr(0, space)), .text = value.substr(space + 1)};
}

/// What the first rank said under this key, which may be this one.
Said say_first(c10d::Store& store, const std::string& key, int32_t rank, const std::string& value) {
  const std::string own = text(rank, ' ', value);
  const std::string first = store.compareSet(key, "", own);
  return parse_said(first.empty() ? own : first);
}

struct Field {
  std::string name;
  std::string value;
};

std::vector<Field> fields_of(const std::string& statement) {
  std::vector<Field> fields;
  for (size_t begin = 0; begin < statement.size();) {
    const size_t tab = statement.find('\t', begin), end = statement.find('\n', begin);
    fields.push_back({.name = statement.substr(begin, tab - begin), .value = statement.substr(tab + 1, end - tab - 1)});
    begin = end + 1;
  }
  return fields;
}

/// Statement lines of the gradients, so that they compare and print like the other fields.
std::string with_gradients(const std::string& fields, const std::string& gradients) {
  std::string all = fields;
  size_t tensor = 0;
  for (const Field& field : fields_of(fields)) {
    if (field.name == "call" || field.name == "heads" || tensor >= gradients.size()) continue;
    all += field.name + ".requires_grad\t" + (gradients[tensor++] == '1' ? "True" : "False") + "\n";
  }
  return all;
}

}  // namespace

Agreement::Agreement(c10::intrusive_ptr<c10d::Store> store, RankOf rank, std::chrono::milliseconds timeout,
                     std::shared_ptr<Lookout> lookout)
    : store_(std::move(store)),
      rank_(rank),
      number_(number_of(rank.rank)),
      timeout_(timeout),
      lookout_(std::move(lookout)) {}

std::string Agreement::key(int64_t call, std::string_view name) const { return text(call, '/', name); }

Agreement::StatementId Agreement::foreseen() const {
  if (step_.size() < last_step_.size()) return last_step_[step_.size()];
  return last_ == kNone ? kNone : followed_by_[static_cast<size_t>(last_)];
}

Agreement::StatementId Agreement::statement_ago(int64_t calls_ago) const {
  auto ago = static_cast<size_t>(calls_ago);
  if (ago <= step_.size()) return step_[step_.size() - ago];
  ago -= step_.size();  // of the step before
  return ago <= last_step_.size() ? last_step_[last_step_.size() - ago] : kNone;
}

bool Agreement::matches(StatementId id, const Statement& statement) const {
  if (id == kNone) return false;
  const Known& known = known_[static_cast<size_t>(id)];
  return known.fields == statement.fields && (statement.follows || known.gradients == statement.gradients);
}

Agreement::StatementId Agreement::intern(std::string fields, std::string gradients) {
  const auto [it, is_new] = ids_.emplace(text(fields, '\r', gradients), static_cast<StatementId>(known_.size()));
  if (is_new) {
    known_.push_back({.fields = std::move(fields), .gradients = std::move(gradients)});
    followed_by_.push_back(kNone);
  }
  return it->second;
}

Agreement::StatementId Agreement::resolve(const Statement& statement) {
  const StatementId expected = foreseen();
  if (matches(expected, statement)) return expected;
  if (num_ranks() == 1) return intern(statement.fields, statement.gradients);
  return announce(statement);
}

std::string Agreement::foresee(const Statement& statement) {
  const std::lock_guard lock(mutex_);
  if (!matches(foreseen(), statement)) {
    const auto before = last_of_.find(statement.fields);
    if (before != last_of_.end()) return known_[static_cast<size_t>(before->second)].gradients;
  }
  resolved_ = resolve(statement);
  return known_[static_cast<size_t>(*resolved_)].gradients;
}

void Agreement::agree(const Statement& statement) {
  const std::lock_guard lock(mutex_);
  StatementId id = kNone;
  if (resolved_ && matches(*resolved_, statement)) {
    id = *resolved_;
  } else {
    id = resolve(statement);
  }
  resolved_.reset();
  if (last_ != kNone) followed_by_[static_cast<size_t>(last_)] = id;
  last_ = id;
  last_of_[statement.fields] = id;
  step_.push_back(id);
  num_come_to_ = ++num_calls_;
}

void Agreement::begin_step() {
  const std::lock_guard lock(mutex_);
  last_step_ = std::exchange(step_, {});
}

Agreement::StatementId Agreement::announce(const Statement& statement) {
  const int64_t call = num_calls_;
  num_come_to_ = call + 1;
  const Said first = say_first(*store_, key(call, kFields), number_, statement.fields);
  if (first.text != statement.fields) throw_mismatch(statement.fields, first.rank, first.text);
  const Said gradients =
      say_first(*store_, key(call, statement.follows ? kFollowed : kGradients), number_, statement.gradients);
  if (!statement.follows && gradients.text != statement.gradients) {
    throw_mismatch(with_gradients(statement.fields, statement.gradients), gradients.rank,
                   with_gradients(statement.fields, gradients.text));
  }
  store_->set(kLastAnnounced, std::to_string(call));
  if (store_->add(key(call, kCount), 1) == num_ranks()) {
    // All are here, so all have read what was announced before.
    if (last_announced_ >= 0) {
      for (const char* name : {kFields, kGradients, kFollowed, kCount, kDone})
        store_->deleteKey(key(last_announced_, name));
    }
    store_->set(key(call, kDone), "1");
  } else {
    await_all(call, fields_of(statement.fields)[0].value);
  }
  last_announced_ = call;
  std::string agreed = statement.gradients;
  if (statement.follows) {
    const std::string by_rows = key(call, kGradients);
    agreed = store_->check({by_rows}) ? parse_said(store_->get_to_str(by_rows)).text : gradients.text;
  }
  return intern(statement.fields, std::move(agreed));
}

void Agreement::await_all(int64_t call, const std::string& name) {
  const std::string done = key(call, kDone);
  using Clock = std::chrono::steady_clock;
  const Clock::time_point begin = Clock::now();
  std::chrono::microseconds pause(100);
  Wait wait(*lookout_, name);
  Clock::time_point next_look = begin + wait.patience();
  while (!store_->check({done})) {
    lookout_->board()->check();
    const Clock::time_point now = Clock::now();
    if (now - begin > timeout_) {
      const std::string absent = wait.absent(*this);
      throw StateError(text(
          name, ": rank ", number_, " waited ", std::chrono::duration_cast<std::chrono::seconds>(timeout_).count(),
          " s, the group's timeout, for ", absent.empty() ? "the other ranks" : absent, " to come to the same call"));
    }
    if (now > next_look) {
      wait.look(/*but=*/this);
      next_look = now + wait.patience();
    }
    std::this_thread::sleep_for(pause);
    pause = std::min<std::chrono::microseconds>(pause * 2, std::chrono::milliseconds(10));
  }
  wait.end();
}

void Agreement::throw_mismatch(const std::string& own, int32_t other_rank, const std::string& other) const {
  const std::vector<Field> mine = fields_of(own), theirs = fields_of(other);
  const std::string call = !mine.empty() ? mine[0].value : "";
  for (size_t i = 0; i < std::max(mine.size(), theirs.size()); ++i) {
    const Field absent{.name = "", .value = "none"};
    Field a = i < mine.size() ? mine[i] : absent, b = i < theirs.size() ? theirs[i] : absent;
    if (a.name == b.name && a.value == b.value) continue;
    const std::string& name = a.name.empty() ? b.name : a.name;
    if (a.name != name) a = absent;
    if (b.name != name) b = absent;
    const std::string message =
        text(name, ": got ", a.value, " on rank ", number_, ", expected ", b.value, ", as on rank ", other_rank);
    if (name == "call") throw StateError(message);
    throw ArgumentError(call.empty() ? message : text(call, ": ", message));
  }
  throw StateError(text(call, ": ranks ", number_, " and ", other_rank, " differ"));
}

void Agreement::check_announcements() {
  if (num_ranks() == 1) return;
  const std::lock_guard lock(mutex_);
  if (!store_->check({kLastAnnounced})) return;
  const int64_t announced = std::stoll(store_->get_to_str(kLastAnnounced));
  if (announced <= last_announced_ || announced >= num_calls_) return;
  // Another rank announced a call that this one has been through as foreseen. Keys of it stay: not all ranks came.
  const Said other = parse_said(store_->get_to_str(key(announced, kFields)));
  const int64_t calls_ago = num_calls_ - announced;
  const StatementId then = statement_ago(calls_ago);
  if (then == kNone) {
    throw StateError(text("call: got ", fields_of(other.text)[0].value, " on rank ", other.rank,
                          ", expected the call that rank ", number_, " made ", calls_ago, " calls ago"));
  }
  const Known& own = known_[static_cast<size_t>(then)];
  if (own.fields != other.text) throw_mismatch(own.fields, other.rank, other.text);
  const std::string by_rows = key(announced, kGradients);
  if (store_->check({by_rows})) {
    const Said gradients = parse_said(store_->get_to_str(by_rows));
    throw_mismatch(with_gradients(own.fields, own.gradients), gradients.rank,
                   with_gradients(other.text, gradients.text));
  }
  throw StateError(text("rank ", other.rank, " announced a call that rank ", number_, " took as in the step before"));
}

}  // namespace knapformer
