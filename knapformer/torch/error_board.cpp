#include "knapformer/torch/error_board.h"

#include "knapformer/core/error.h"

namespace knapformer {
namespace {

constexpr const char* kErrorKey = "error";
constexpr const char* kReasonKey = "reason/";  // and the rank
constexpr const char* kPlaceKey = "place/";    // and the rank
constexpr char kArgument = 'A', kState = 'S';

}  // namespace

void ErrorBoard::post(const std::exception& error) noexcept {
  if (!store_) return;
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

void ErrorBoard::check() {
  if (!store_ || !store_->check({kErrorKey})) return;
  const std::string entry = store_->get_to_str(kErrorKey);
  const std::string message = entry.substr(1);
  {
    const std::lock_guard lock(mutex_);
    if (first_error_.empty()) first_error_ = message;
  }
  if (entry[0] == kArgument) throw ArgumentError(message);
  throw StateError(message);
}

void ErrorBoard::leave_reason(const std::string& reason) {
  if (store_) store_->set(text(kReasonKey, rank_), reason);
}

std::string ErrorBoard::reason_of(int32_t rank) { return store_->get_to_str(text(kReasonKey, rank)); }

void ErrorBoard::leave_place(const std::string& place) {
  if (store_) store_->set(text(kPlaceKey, rank_), place);
}

std::optional<std::string> ErrorBoard::place_of(int32_t rank) {
  const std::string key = text(kPlaceKey, rank);
  if (!store_ || !store_->check({key})) return std::nullopt;
  return store_->get_to_str(key);
}

void ErrorBoard::check_usable() {
  const std::lock_guard lock(mutex_);
  if (!first_error_.empty()) {
    throw StateError(
        text("balancer: stopped by an earlier error, expected a new balancer after it (", first_error_, ")"));
  }
}

}  // namespace knapformer
