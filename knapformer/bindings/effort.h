// Effort as Python has it: a name or a number of moves.
#pragma once

#include <cstdint>
#include <string>
#include <variant>

#include "knapformer/core/error.h"
#include "knapformer/core/planner.h"

namespace knapformer {

inline Effort effort_of(const std::variant<int64_t, std::string>& effort) {
  if (const auto* name = std::get_if<std::string>(&effort)) return Effort::parse(*name);
  const int64_t moves = std::get<int64_t>(effort);
  if (moves < 0) throw_argument("effort", moves, "'low', 'default', 'high' or a number of moves of at least 0");
  return {.moves = moves};
}

}  // namespace knapformer
