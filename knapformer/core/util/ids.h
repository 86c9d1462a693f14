// Ranks, bags and sequences as types of their own, so that an index of one cannot stand for another.
//
// An id is a dense 32-bit integer: it indexes flat arrays and costs nothing. Ids count up from 0 over the whole group
// that a plan is made for: sequence ids through the ranks (those of rank 0 first), bag ids through the replicas.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "knapformer/core/util/error.h"

namespace knapformer {

template <class Tag>
struct Id {
  int32_t value = 0;

  constexpr Id() = default;
  /// The number must fit into 32 bits: an id is never a truncated number.
  template <class Int>
  constexpr explicit Id(Int v) : value(static_cast<int32_t>(v)) {
    KNAPFORMER_ASSERT(std::in_range<int32_t>(v));
  }
  constexpr size_t index() const { return static_cast<size_t>(value); }
  constexpr auto operator<=>(const Id&) const = default;
};

using Rank = Id<struct RankTag>;
using BagId = Id<struct BagTag>;
using SequenceId = Id<struct SequenceTag>;

}  // namespace knapformer
