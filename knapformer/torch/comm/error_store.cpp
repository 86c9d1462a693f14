#include "knapformer/torch/comm/error_store.h"

#include "knapformer/core/util/error.h"

namespace knapformer {
namespace {

constexpr const char* kErrorKey = "error";
constexpr char kArgument = 'A', kState = 'S';

}  // namespace

void ErrorStore::post(const std::exception& error) noexcept {
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

void ErrorStore::check() {
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

void ErrorStore::check_usable() {
  const std::lock_guard lock(mutex_);
  if (!first_error_.empty()) {
    throw StateError(
        text("balancer: stopped by an earlier error, expected a new balancer after it (", first_error_, ")"));
  }
}

void ErrorStore::leave_note(std::string_view name, const std::string& note) {
  store_->set(text(name, '/', rank_), note);
}

std::optional<std::string> ErrorStore::note_of(int32_t rank, std::string_view name) {
  const std::string key = text(name, '/', rank);
  if (!store_->check({key})) return std::nullopt;
  return store_->get_to_str(key);
}

}  // namespace knapformer
