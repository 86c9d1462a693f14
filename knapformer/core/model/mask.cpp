#include "knapformer/core/model/mask.h"

#include <algorithm>
#include <array>
#include <type_traits>

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

constexpr std::array<std::string_view, 6> kNames = {"full",         "causal", "prefix",
                                                    "block_causal", "window", "density"};  // by Kind

/// Visits the numbers of the mask's text form, in order: visit(member, least).
template <class Self, class Visit>
void for_each_number(Self& mask, Visit visit) {
  using enum Mask::Kind;
  if (mask.kind == kPrefix || mask.kind == kBlockCausal) visit(mask.text_tokens, 0);
  if (mask.kind == kBlockCausal) visit(mask.frame_tokens, 1);
  if (mask.kind == kWindow) {
    visit(mask.left, 0);
    visit(mask.right, 0);
  }
  if (mask.kind == kDensity) visit(mask.density, 0);
}

}  // namespace

Mask Mask::parse(std::string_view text) {
  const std::string_view name = text.substr(0, text.find(':'));
  TextReader reader(text.substr(name.size()));
  const auto found = std::ranges::find(kNames, name);
  bool is_good = found != kNames.end();
  Mask mask;
  if (is_good) mask.kind = static_cast<Kind>(found - kNames.begin());
  for_each_number(mask, [&]<class Number>(Number& number, int32_t min) {
    const auto read =
        reader.accept(':') ? reader.number<Number>(min, std::is_same_v<Number, double> ? 1 : kMaxTokens) : std::nullopt;
    is_good = is_good && read;
    number = read.value_or(min);
  });
  if (!is_good || !reader.at_end()) throw_argument("mask", knapformer::text("'", text, "'"), kForms);
  return mask;
}

std::string Mask::str() const {
  std::string out(kNames[static_cast<size_t>(kind)]);
  for_each_number(*this, [&](auto number, int32_t) { out += text(':', number); });
  return out;
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
