// A cursor over a short text form such as "g8/4/2/1n4": literal characters and bounded numbers, nothing more.
#pragma once

#include <charconv>
#include <cstdint>
#include <optional>
#include <string_view>

namespace knapformer {

class TextReader {
 public:
  explicit TextReader(std::string_view text) : text_(text) {}

  bool at_end() const { return position_ == text_.size(); }
  size_t position() const { return position_; }

  void skip_spaces() {
    while (!at_end() && text_[position_] == ' ') ++position_;
  }

  bool accept(char c) {
    if (at_end() || text_[position_] != c) return false;
    ++position_;
    return true;
  }

  /// A decimal integer in [min, max], without sign.
  std::optional<int32_t> integer(int32_t min, int32_t max) { return parse(min, max); }
  /// A decimal number in [min, max], without sign.
  std::optional<double> number(double min, double max) { return parse(min, max); }

 private:
  template <class T>
  std::optional<T> parse(T min, T max) {
    if (at_end() || text_[position_] < '0' || text_[position_] > '9') return std::nullopt;
    T value = 0;
    const auto [end, error] = std::from_chars(text_.data() + position_, text_.data() + text_.size(), value);
    if (error != std::errc() || value < min || value > max) return std::nullopt;
    position_ = static_cast<size_t>(end - text_.data());
    return value;
  }

  std::string_view text_;
  size_t position_ = 0;
};

}  // namespace knapformer
