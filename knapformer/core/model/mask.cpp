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

/// Pairs of the first `num_queries` queries with a key strictly before the query, at most `reach` away. Mirrored: of
/// the last ones, with a key after the query.
int64_t one_side(int64_t num_queries, int64_t reach) {
  if (num_queries == 0) return 0;
  const int64_t r = reach < 0 ? num_queries - 1 : std::min(reach, num_queries - 1);
  return triangle(r) + (num_queries - 1 - r) * r;
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

int64_t Mask::pairs_before(int64_t seq_len, int64_t num_queries) const {
  const int64_t text_len = std::min(text_tokens, seq_len);
  const int64_t of_text = std::min(text_len, num_queries), behind = num_queries - of_text;
  switch (kind) {
    case Kind::kFull:
      return num_queries * seq_len;
    case Kind::kCausal:
      return triangle(num_queries);
    case Kind::kPrefix:
      return of_text * text_len + triangle(num_queries) - triangle(of_text);
    case Kind::kBlockCausal: {
      // Queries of whole frames f = 1..F see text_len + f * frame keys each; those behind them see their frame as well,
      // which may be cut off by the end.
      const int64_t frames = behind / frame_tokens, rest = behind - frames * frame_tokens;
      return of_text * text_len + frame_tokens * (frames * text_len + triangle(frames) * frame_tokens) +
             rest * std::min(seq_len, text_len + (frames + 1) * frame_tokens);
    }
    case Kind::kWindow:
      return num_queries + one_side(num_queries, left) + one_side(seq_len, right) -
             one_side(seq_len - num_queries, right);
    case Kind::kDensity:
      return static_cast<int64_t>(density * static_cast<double>(num_queries * seq_len));
  }
  KNAPFORMER_ASSERT(false);
}

int64_t Mask::keys_begin(int64_t first) const {
  return kind == Kind::kWindow && left >= 0 ? std::max<int64_t>(0, first - left) : 0;
}

int64_t Mask::keys_end(int64_t seq_len, int64_t first, int64_t last) const {
  const int64_t text_len = std::min(text_tokens, seq_len);
  switch (kind) {
    case Kind::kFull:
    case Kind::kDensity:
      return seq_len;
    case Kind::kCausal:
      return last;
    case Kind::kPrefix:
      return first < text_len ? std::max(last, text_len) : last;
    case Kind::kBlockCausal: {
      const int64_t frames = (std::max(last, text_len) - text_len + frame_tokens - 1) / frame_tokens;
      return std::min(seq_len, text_len + frames * frame_tokens);
    }
    case Kind::kWindow:
      return right < 0 ? seq_len : std::min(seq_len, last + right);
  }
  KNAPFORMER_ASSERT(false);
}

std::vector<QueryPart> Mask::query_parts(int64_t seq_len, int32_t num_parts) const {
  const int64_t total = num_parts > 1 ? pairs(seq_len) : 0;
  std::vector<QueryPart> parts;
  parts.reserve(static_cast<size_t>(num_parts));
  for (int64_t j = 1, first = 0; j <= num_parts; ++j) {
    // A mask of no pairs is cut evenly.
    int64_t last = seq_len * j / num_parts;
    if (total > 0 && j < num_parts) {
      const int64_t target = total / num_parts * j + total % num_parts * j / num_parts;
      int64_t low = first;
      for (last = seq_len; low < last;) {  // the fewest queries with so many pairs
        const int64_t middle = low + (last - low) / 2;
        if (pairs_before(seq_len, middle) >= target) {
          last = middle;
        } else {
          low = middle + 1;
        }
      }
    }
    QueryPart& part =
        parts.emplace_back(QueryPart{.first_query = first, .num_queries = last - first, .first_key = first});
    if (last > first) {
      part.first_key = keys_begin(first);
      part.num_keys = keys_end(seq_len, first, last) - part.first_key;
    }
    first = last;
  }
  return parts;
}

}  // namespace knapformer
