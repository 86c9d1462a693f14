// Effort: how much a planner searches.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "knapformer/core/util/error.h"

namespace knapformer {

/// Counted in the moves tried for each replica, so it does not depend on the machine. From 0 on, `moves` is their
/// number; a negative value is a name for a number that grows with the sequences.
struct Effort {
  static constexpr int64_t kLow = 0;  // no search: cheap enough to plan inside a training step
  static constexpr int64_t kDefault = -1;
  static constexpr int64_t kHigh = -2;  // 50 times the default

  /// More moves take minutes for a replica, and find nothing that this many do not find.
  static constexpr int64_t kMaxMoves = 100'000'000;

  /// In units of the lower bound: for a plan within this, no search is worthwhile, and for a start of one no other.
  static constexpr double kGoodEnough = 1.0002, kGoodStart = 1.001;

  int64_t moves = kDefault;

  /// As users write it: "low", "default", "high" or the number of moves.
  std::string str() const {
    if (moves == kLow) return "low";
    if (moves == kDefault) return "default";
    return moves == kHigh ? "high" : std::to_string(moves);
  }
  /// Throws ArgumentError (argument "effort").
  void validate() const {
    if (moves < kHigh || moves > kMaxMoves) throw_argument("effort", moves, expected());
  }
  /// "low", "default", "high". Throws ArgumentError (argument "effort").
  static Effort parse(std::string_view name) {
    if (name == "low") return {.moves = kLow};
    if (name == "default") return {.moves = kDefault};
    if (name == "high") return {.moves = kHigh};
    throw_argument("effort", text("'", name, "'"), expected());
  }

  static std::string expected() { return text("'low', 'default', 'high' or a number of moves from 0 to ", kMaxMoves); }
};

}  // namespace knapformer
