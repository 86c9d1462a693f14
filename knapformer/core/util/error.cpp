#include "knapformer/core/util/error.h"

#include <cstdio>
#include <cstdlib>

namespace knapformer {

void check_range(std::string_view argument, double value, double min, double max) {
  if (value >= min && value <= max) return;  // not a number is refused
  throw_argument(argument, value, text("a number from ", min, " to ", max));
}

void assertion_failed(const char* condition, const char* file, int line) {
  std::fprintf(stderr, "knapformer: assertion failed at %s:%d: %s\nThis is a bug in knapformer, not in your code.\n",
               file, line, condition);
  std::abort();
}

}  // namespace knapformer
