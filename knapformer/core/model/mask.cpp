#include "knapformer/core/model/mask.h"

#include <algorithm>
#include <array>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>

#include "knapformer/core/util/error.h"
#include "knapformer/core/util/text_reader.h"

namespace knapformer {
namespace {

constexpr int64_t kMaxTokens = INT32_MAX;

/// 1 + 2 + ... + n.
int64_t triangle(int64_t n) { return n % 2 == 0 ? n / 2 * (n + 1) : (n + 1) / 2 * n; }

/// The pairs of the first `count` queries of a run with this range of keys.
int64_t pairs_before(const KeyRange& range, int64_t count) {
  const int64_t growth = (range.end_moves ? 1 : 0) - (range.first_moves ? 1 : 0);
  return count * (range.end - range.first) + growth * (triangle(count) - count);
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

Mask Mask::parse(std::string_view text) {
  const std::string_view name = text.substr(0, text.find(':'));
  TextReader reader(text.substr(name.size()));
  const auto found = std::ranges::find(kNames, name);
  bool is_good = found != kNames.end();
  Mask mask;
  if (is_good) {
    mask.kind = static_cast<Kind>(found - kNames.begin());
    for_each_number(mask, [&]<class Number>(Number& number, int32_t min) {
      const auto read = reader.accept(':') ? reader.number<Number>(min, std::is_same_v<Number, double> ? 1 : kMaxTokens)
                                           : std::nullopt;
      is_good = is_good && read;
      number = read.value_or(min);
    });
    is_good = is_good && reader.at_end();
  } else if (std::optional<std::vector<MaskRun>> runs = written_runs(text)) {
    is_good = true;
    mask.kind = Kind::kWritten;
    Written written{.text = std::string(text), .seq_len = 0, .pairs = 0, .runs = *std::move(runs)};
    for (const MaskRun& run : written.runs) {
      written.seq_len += run.num_queries;
      written.pairs += run.pairs_before(run.num_queries);
    }
    mask.written = std::make_shared<const Written>(std::move(written));
  }
  if (!is_good) throw_argument("mask", knapformer::text("'", text, "'"), kForms);
  return mask;
}

std::string Mask::str() const {
  if (written) return written->text;
  std::string out(kNames[static_cast<size_t>(kind)]);
  for_each_number(*this, [&](auto number, int32_t) { out += text(':', number); });
  return out;
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

namespace {

/// The run of keys that holds all which these queries see. `first_run`: one before them, or theirs; then the last one
/// of theirs. `queries`: before each run.
QueryPart part_of(std::span<const MaskRun> runs, std::span<const int64_t> queries, int64_t first, int64_t end,
                  size_t& first_run) {
  int64_t first_key = queries.back(), end_key = 0;
  for (size_t& run = first_run; run < runs.size() && queries[run] < end; ++run) {
    const int64_t from = std::max(first, queries[run]) - queries[run],
                  to = std::min(end, queries[run + 1]) - queries[run];
    if (!runs[run].keys.empty()) {
      first_key = std::min(first_key, runs[run].part(from, 1).keys.front().first);
      end_key = std::max({end_key, runs[run].part(from, 1).keys.back().end, runs[run].part(to - 1, 1).keys.back().end});
    }
    if (end < queries[run + 1]) break;  // the next part begins in this run
  }
  const bool any = end > first && end_key > first_key;
  return {.first_query = first,
          .num_queries = end - first,
          .first_key = any ? first_key : first,
          .num_keys = any ? end_key - first_key : 0};
}

}  // namespace

std::vector<QueryPart> Mask::query_parts(int64_t seq_len, int32_t num_parts) const {
  if (num_parts == 1) return {{.first_query = 0, .num_queries = seq_len, .first_key = 0, .num_keys = seq_len}};
  const std::vector<MaskRun> all = runs(seq_len);
  std::vector<int64_t> queries = {0}, pairs = {0};  // before each run, and in all
  for (const MaskRun& run : all) {
    queries.push_back(queries.back() + run.num_queries);
    pairs.push_back(pairs.back() + run.pairs_before(run.num_queries));
  }
  /// The fewest queries with so many pairs.
  const auto queries_with = [&](int64_t target) {
    const auto run = static_cast<size_t>(std::ranges::lower_bound(pairs, target) - pairs.begin());
    if (run == 0) return int64_t{0};
    int64_t low = 0, high = all[run - 1].num_queries;
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      (pairs[run - 1] + all[run - 1].pairs_before(middle) >= target ? high : low) = middle;
    }
    return queries[run - 1] + high;
  };
  std::vector<QueryPart> parts;
  parts.reserve(static_cast<size_t>(num_parts));
  size_t run = 0;
  for (int64_t j = 1, first = 0; j <= num_parts; ++j) {
    const int64_t total = pairs.back(), target = total / num_parts * j + total % num_parts * j / num_parts;
    int64_t end = seq_len;
    if (j < num_parts) end = total > 0 ? queries_with(target) : seq_len * j / num_parts;  // no pairs: evenly
    parts.push_back(part_of(all, queries, first, end, run));
    first = end;
  }
  return parts;
}

}  // namespace knapformer
