#include "knapformer/core/error.h"

#include <cstdio>
#include <cstdlib>

namespace knapformer {

void check_range(std::string_view argument, double value, double least, double most) {
  if (value >= least && value <= most) return;  // not a number is refused
  throw_argument(argument, value, text("a number from ", least, " to ", most));
}

void assertion_failed(const char* condition, const char* file, int line) {
  std::fprintf(stderr, "knapformer: assertion failed at %s:%d: %s\nThis is a bug in knapformer, not in your code.\n",
               file, line, condition);
  std::abort();
}

}  // namespace knapformer
