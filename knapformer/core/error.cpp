#include "knapformer/core/error.h"

#include <cstdio>
#include <cstdlib>

namespace knapformer {

void assertion_failed(const char* condition, const char* file, int line) {
  std::fprintf(stderr, "knapformer: assertion failed at %s:%d: %s\nThis is a bug in knapformer, not in your code.\n",
               file, line, condition);
  std::abort();
}

}  // namespace knapformer
