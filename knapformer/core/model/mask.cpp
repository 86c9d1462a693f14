#include "knapformer/core/model/mask.h"

#include <algorithm>

#include "knapformer/core/util/error.h"

namespace knapformer {
namespace {

/// 1 + 2 + ... + n.
int64_t triangle(int64_t n) { return n % 2 == 0 ? n / 2 * (n + 1) : (n + 1) / 2 * n; }

/// The pairs of the first `count` queries of a run with this range of keys.
int64_t pairs_before(const KeyRange& range, int64_t count) {
  const int64_t growth = (range.end_moves ? 1 : 0) - (range.first_moves ? 1 : 0);
  return count * (range.end - range.first) + growth * (triangle(count) - count);
}

/// Visits the runs of a mask that is not written, each with one range of keys: visit(num_queries, keys).
template <class Visit>
void for_each_run(const Mask& mask, int64_t seq_len, Visit visit) {
  const int64_t text_len = std::min(mask.text_tokens, seq_len);
  int64_t next = 0;  // query
  const auto add = [&](int64_t end, const KeyRange& keys) {
    if (end > next) visit(end - next, keys);
    next = std::max(next, end);
  };
  switch (mask.kind) {
    case Mask::Kind::kFull:
    case Mask::Kind::kDensity:
      add(seq_len, {.first = 0, .end = seq_len});
      break;
    case Mask::Kind::kCausal:
    case Mask::Kind::kPrefix:
      add(text_len, {.first = 0, .end = text_len});
      add(seq_len, {.first = 0, .end = text_len + 1, .first_moves = false, .end_moves = true});
      break;
    case Mask::Kind::kBlockCausal:
      add(text_len, {.first = 0, .end = text_len});
      while (next < seq_len) {
        const int64_t end = std::min(seq_len, next + mask.frame_tokens);
        add(end, {.first = 0, .end = end});
      }
      break;
    case Mask::Kind::kWindow: {
      // Before these queries the first key is 0, and the last one moves.
      const int64_t first_moves = std::min(mask.left, seq_len);
      const int64_t end_stops = std::max<int64_t>(0, seq_len - mask.right);
      for (const int64_t end : {std::min(first_moves, end_stops), std::max(first_moves, end_stops), seq_len}) {
        const bool moves = next >= first_moves, stops = next >= end_stops;
        add(end, {.first = moves ? next - mask.left : 0,
                  .end = stops ? seq_len : next + mask.right + 1,
                  .first_moves = moves,
                  .end_moves = !stops});
      }
      break;
    }
    case Mask::Kind::kWritten:
      KNAPFORMER_ASSERT(false);
  }
}

}  // namespace

int64_t MaskRun::pairs_before(int64_t count) const {
  int64_t pairs = 0;
  for (const KeyRange& range : keys) pairs += knapformer::pairs_before(range, count);
  return pairs;
}

MaskRun MaskRun::part(int64_t first, int64_t count) const {
  MaskRun part{.num_queries = count, .keys = keys};
  for (KeyRange& range : part.keys) {
    if (range.first_moves) range.first += first;
    if (range.end_moves) range.end += first;
  }
  return part;
}

bool Mask::operator==(const Mask& other) const {
  const auto same = [&](auto... members) { return ((this->*members == other.*members) && ...); };
  if (!same(&Mask::kind, &Mask::text_tokens, &Mask::frame_tokens, &Mask::left, &Mask::right, &Mask::density))
    return false;
  return written == other.written || (written && other.written && written->text == other.written->text);
}

void Mask::check_length(int64_t seq_len) const {
  if (!written || written->seq_len == seq_len) return;
  throw_argument("mask", text("'", written->text, "' for a sequence of ", seq_len, " tokens"),
                 text("one of ", written->seq_len, " tokens"));
}

int64_t Mask::pairs(int64_t seq_len) const {
  check_length(seq_len);
  if (written) return written->pairs;
  if (kind == Kind::kDensity) return static_cast<int64_t>(density * static_cast<double>(seq_len * seq_len));
  if (kind == Kind::kBlockCausal) {  // there may be as many runs as tokens
    // Queries of whole frames f = 1..F see text_len + f * frame keys each; those behind them see all.
    const int64_t text_len = std::min(text_tokens, seq_len), behind = seq_len - text_len;
    const int64_t frames = behind / frame_tokens, rest = behind - frames * frame_tokens;
    return text_len * text_len + frame_tokens * (frames * text_len + triangle(frames) * frame_tokens) + rest * seq_len;
  }
  int64_t pairs = 0;
  for_each_run(*this, seq_len, [&](int64_t num_queries, const KeyRange& keys) {
    pairs += knapformer::pairs_before(keys, num_queries);
  });
  return pairs;
}

std::vector<MaskRun> Mask::runs(int64_t seq_len) const {
  check_length(seq_len);
  if (written) return written->runs;
  std::vector<MaskRun> runs;
  for_each_run(*this, seq_len, [&](int64_t num_queries, const KeyRange& keys) {
    runs.push_back({.num_queries = num_queries, .keys = {keys}});
  });
  return runs;
}

bool Mask::sees_as(const Mask& other, int64_t seq_len) const {
  if (*this == other) return true;
  if (pairs(seq_len) != other.pairs(seq_len)) return false;
  if (kind == Kind::kDensity || other.kind == Kind::kDensity) return true;
  const std::vector<MaskRun> own = runs(seq_len), others = other.runs(seq_len);
  int64_t begin = 0, own_begin = 0, other_begin = 0;
  for (auto a = own.begin(), b = others.begin(); begin < seq_len;) {
    const int64_t end = std::min(own_begin + a->num_queries, other_begin + b->num_queries);
    for (const int64_t query : {begin, end - 1}) {  // between them ends move evenly
      const MaskRun of_own = a->part(query - own_begin, 1), of_other = b->part(query - other_begin, 1);
      const auto same = [](const KeyRange& x, const KeyRange& y) { return x.first == y.first && x.end == y.end; };
      if (!std::ranges::equal(of_own.keys, of_other.keys, same)) return false;
    }
    begin = end;
    if (end == own_begin + a->num_queries) own_begin += (a++)->num_queries;
    if (end == other_begin + b->num_queries) other_begin += (b++)->num_queries;
  }
  return true;
}

int64_t Mask::pairs_of(int64_t seq_len, const QueryPart& part) const {
  if (kind == Kind::kDensity) return static_cast<int64_t>(density * static_cast<double>(part.num_queries * seq_len));
  int64_t pairs = 0, first = 0;
  for (const MaskRun& run : runs(seq_len)) {
    const auto before = [&](int64_t query) {
      return run.pairs_before(std::clamp<int64_t>(query - first, 0, run.num_queries));
    };
    pairs += before(part.first_query + part.num_queries) - before(part.first_query);
    first += run.num_queries;
  }
  return pairs;
}

}  // namespace knapformer
