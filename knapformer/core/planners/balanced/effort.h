// How much a planner searches.
#pragma once

#include <cstdint>
#include <string_view>

#include "knapformer/core/util/error.h"

namespace knapformer {

/// In moves tried for each replica, which do not depend on the machine. From 0 on it is that number; below, a name for
/// a number that grows with the sequences.
struct Effort {
  static constexpr int64_t kLow = 0;  // no search: cheap enough to plan inside a training step
  static constexpr int64_t kDefault = -1;
  static constexpr int64_t kHigh = -2;  // 50 times the default

  int64_t moves = kDefault;

  /// "low", "default", "high". Throws ArgumentError (argument "effort").
  static Effort parse(std::string_view name) {
    if (name == "low") return {.moves = kLow};
    if (name == "default") return {.moves = kDefault};
    if (name == "high") return {.moves = kHigh};
    throw_argument("effort", text("'", name, "'"), "'low', 'default', 'high' or a number of moves of at least 0");
  }
};

}  // namespace knapformer
