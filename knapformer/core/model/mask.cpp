#include "knapformer/core/model/mask.h"

#include <algorithm>

#include "knapformer/core/util/error.h"
#include "knapformer/core/util/text_reader.h"

namespace knapformer {
namespace {

constexpr int32_t kMaxTokens = INT32_MAX;

/// 1 + 2 + ... + n.
int64_t triangle(int64_t n) { return n % 2 == 0 ? n / 2 * (n + 1) : (n + 1) / 2 * n; }

/// Pairs with a key strictly before (or, mirrored, after) the query, at most `reach` away.
int64_t one_side(int64_t seq_len, int64_t reach) {
  const int64_t r = reach < 0 ? seq_len - 1 : std::min(reach, seq_len - 1);
  return triangle(r) + (seq_len - 1 - r) * r;
}

[[noreturn]] void throw_malformed(std::string_view text) {
  throw_argument("mask", knapformer::text("'", text, "'"), Mask::kForms);
}

}  // namespace

Mask Mask::parse(std::string_view text) {
  const std::string_view name = text.substr(0, text.find(':'));
  TextReader reader(text.substr(name.size()));
  const auto count = [&](int32_t min) {
    if (!reader.accept(':')) throw_malformed(text);
    const auto value = reader.integer(min, kMaxTokens);
    if (!value) throw_malformed(text);
    return int64_t{*value};
  };
  Mask mask;
  if (name == "full") {
    mask.kind = Kind::kFull;
  } else if (name == "causal") {
    mask.kind = Kind::kCausal;
  } else if (name == "prefix") {
    mask.kind = Kind::kPrefix;
    mask.text_tokens = count(0);
  } else if (name == "block_causal") {
    mask.kind = Kind::kBlockCausal;
    mask.text_tokens = count(0);
    mask.frame_tokens = count(1);
  } else if (name == "window") {
    mask.kind = Kind::kWindow;
    mask.left = count(0);
    mask.right = count(0);
  } else if (name == "density") {
    mask.kind = Kind::kDensity;
    const auto share = reader.accept(':') ? reader.number(0, 1) : std::nullopt;
    if (!share) throw_malformed(text);
    mask.density = *share;
  } else {
    throw_malformed(text);
  }
  if (!reader.at_end()) throw_malformed(text);
  return mask;
}

std::string Mask::str() const {
  switch (kind) {
    case Kind::kFull:
      return "full";
    case Kind::kCausal:
      return "causal";
    case Kind::kPrefix:
      return text("prefix:", text_tokens);
    case Kind::kBlockCausal:
      return text("block_causal:", text_tokens, ':', frame_tokens);
    case Kind::kWindow:
      return text("window:", left, ':', right);
    case Kind::kDensity:
      return text("density:", density);
  }
  KNAPFORMER_ASSERT(false);
}

int64_t Mask::pairs(int64_t seq_len) const {
  const int64_t text_len = std::min(text_tokens, seq_len);
  switch (kind) {
    case Kind::kFull:
      return seq_len * seq_len;
    case Kind::kCausal:
      return triangle(seq_len);
    case Kind::kPrefix:
      return text_len * text_len + triangle(seq_len) - triangle(text_len);
    case Kind::kBlockCausal: {
      // Whole frames f = 1..F see text_len + f * frame keys each; the last, partial one sees everything.
      const int64_t frames = (seq_len - text_len) / frame_tokens;
      const int64_t rest = seq_len - text_len - frames * frame_tokens;
      return text_len * text_len + frame_tokens * (frames * text_len + triangle(frames) * frame_tokens) +
             rest * seq_len;
    }
    case Kind::kWindow:
      return seq_len + one_side(seq_len, left) + one_side(seq_len, right);
    case Kind::kDensity:
      return static_cast<int64_t>(density * static_cast<double>(seq_len * seq_len));
  }
  KNAPFORMER_ASSERT(false);
}

}  // namespace knapformer
