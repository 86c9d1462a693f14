// A cursor over a short text form such as "g8/4/2/1n4": literal characters and bounded numbers, nothing more.
#pragma once

#include <charconv>
#include <optional>
#include <string_view>

#include "knapformer/core/util/error.h"

namespace knapformer {

class TextReader {
 public:
  explicit TextReader(std::string_view text) : text_(text) {}

  bool at_end() const { return position_ == text_.size(); }

  void skip_spaces() {
    while (!at_end() && text_[position_] == ' ') ++position_;
  }

  bool next_is(char c) const { return !at_end() && text_[position_] == c; }

  bool accept(char c) {
    if (!next_is(c)) return false;
    ++position_;
    return true;
  }

  bool accept(std::string_view word) {
    if (!text_.substr(position_).starts_with(word)) return false;
    position_ += word.size();
    return true;
  }

  /// A decimal number in [min, max], without sign.
  template <class T>
  std::optional<T> number(T min, T max) {
    if (at_end() || text_[position_] < '0' || text_[position_] > '9') return std::nullopt;
    T value = 0;
    const auto [end, error] = std::from_chars(text_.data() + position_, text_.data() + text_.size(), value);
    if (error != std::errc() || value < min || value > max) return std::nullopt;
    position_ = static_cast<size_t>(end - text_.data());
    return value;
  }

  /// Throws ArgumentError: at this position something else was expected.
  [[noreturn]] void fail(std::string_view argument, std::string_view expected) const {
    throw_argument(argument, text("'", text_, "'"), text(expected, " at character ", position_ + 1));
  }

 private:
  std::string_view text_;
  size_t position_ = 0;
};

}  // namespace knapformer
