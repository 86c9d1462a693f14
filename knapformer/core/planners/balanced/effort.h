// Effort: how much a planner searches.
#pragma once

#include <algorithm>
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

  /// Times the lower bound: a plan within kGoodEnough needs no search, a start within kGoodStart no other start.
  static constexpr double kGoodEnough = 1.0002, kGoodStart = 1.001;

  int64_t moves = kDefault;

  /// Moves for a replica of so many sequences. must_search: where the first choice of groups misses the limit of
  /// tokens, low effort searches as well.
  int64_t num_moves(int64_t num_sequences, bool must_search) const {
    // In a small instance a move is worth more, and there is time for more of them. Half or twice as many for a
    // sequence change plans by 0.1 %, and planning takes 0.6 or 1.6 times as long.
    constexpr int64_t kMin = 2000, kMax = 125'000, kPerSequence = 140;
    if (moves >= 0) return must_search ? std::max(moves, kMin) : moves;
    const int64_t by_size = std::clamp(kPerSequence * num_sequences, kMin, kMax);
    return moves == kHigh ? 50 * by_size : by_size;
  }

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
