#pragma once

#include <vector>

namespace knapformer {

/// The text of a kernel, which may include numbers.h, and the functions of it that are launched.
struct KernelSource {
  const char* name;  // for messages
  const char* text;
  std::vector<const char*> functions;
};

}  // namespace knapformer
