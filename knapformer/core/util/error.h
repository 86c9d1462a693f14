// One family of errors. They are for the user's mistakes; our own bugs are asserts (KNAPFORMER_ASSERT).
//
// ArgumentError: an argument is wrong. Names the argument, what came, and what was expected. Python sees a ValueError.
// StateError: a call came out of order, or ranks disagree. Python sees a RuntimeError.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

namespace knapformer {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class ArgumentError : public Error {
 public:
  using Error::Error;
};

class StateError : public Error {
 public:
  using Error::Error;
};

/// Writes the parts one after another, as `std::cout << a << b` would.
template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  out.precision(12);
  (out << ... << parts);
  return std::move(out).str();
}

/// "gamma: got -1, expected a finite number >= 0".
template <class Thrown = ArgumentError, class Got>
[[noreturn]] void throw_argument(std::string_view argument, const Got& got, std::string_view expected) {
  throw Thrown(text(argument, ": got ", got, ", expected ", expected));
}

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// The upper bound of all factors, rates and seconds that users give; its inverse is the lower bound of rates. Lengths
/// and widths have their own bounds. So no work or time that follows from them, and no sum over all ranks, leaves the
/// range of a double.
inline constexpr double kMaxMagnitude = 1e30;

/// Throws ArgumentError unless `value` is a number from `min` to `max`.
inline void check_range(std::string_view argument, double value, double min, double max = kMaxMagnitude) {
  if (value >= min && value <= max) return;  // not a number is refused
  throw_argument(argument, value, text("a number from ", min, " to ", max));
}

[[noreturn]] inline void assertion_failed(const char* condition, const char* file, int line) {
  std::fprintf(stderr, "knapformer: assertion failed at %s:%d: %s\nThis is a bug in knapformer, not in your code.\n",
               file, line, condition);
  std::abort();
}

}  // namespace knapformer

/// Always on: a plan that is wrong costs far more than the comparison.
#define KNAPFORMER_ASSERT(condition) \
  ((condition) ? static_cast<void>(0) : ::knapformer::assertion_failed(#condition, __FILE__, __LINE__))
