// What masks let queries see, pair by pair: by their definitions, and by their runs.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "knapformer/core/model/mask.h"

namespace knapformer {

/// Whether query i sees key j, from the words of the definition. Of a density and a written mask it knows nothing.
inline bool sees(const Mask& mask, int64_t i, int64_t j) {
  const auto block = [&](int64_t t) { return t < mask.text_tokens ? -1 : (t - mask.text_tokens) / mask.frame_tokens; };
  switch (mask.kind) {
    case Mask::Kind::kFull:
      return true;
    case Mask::Kind::kCausal:
      return j <= i;
    case Mask::Kind::kPrefix:
      return j <= i || std::max(i, j) < mask.text_tokens;
    case Mask::Kind::kBlockCausal:
      return block(j) <= block(i);
    case Mask::Kind::kWindow:
      return i - j <= mask.left && j - i <= mask.right;
    case Mask::Kind::kDensity:
    case Mask::Kind::kWritten:
      break;
  }
  ADD_FAILURE() << mask.str() << " says nothing of single pairs here";
  return false;
}

using Dense = std::vector<std::vector<bool>>;

/// What runs say of single pairs.
inline Dense dense(const std::vector<MaskRun>& runs, int64_t num_keys) {
  Dense seen;
  for (const MaskRun& run : runs) {
    for (int64_t i = 0; i < run.num_queries; ++i) {
      std::vector<bool>& keys = seen.emplace_back(num_keys);
      for (const KeyRange& range : run.keys) {
        const int64_t first = range.first + (range.first_moves ? i : 0), end = range.end + (range.end_moves ? i : 0);
        EXPECT_LT(first, end);
        for (int64_t j = first; j < end; ++j) {
          EXPECT_FALSE(keys.at(static_cast<size_t>(j)));  // ranges are apart
          keys[static_cast<size_t>(j)] = true;
        }
      }
    }
  }
  return seen;
}

}  // namespace knapformer
