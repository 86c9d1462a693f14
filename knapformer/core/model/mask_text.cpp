// Which texts are masks, and what they say (Mask::parse, Mask::str). mask.h lists the forms.
#include <algorithm>
#include <array>
#include <type_traits>
#include <utility>

#include "knapformer/core/model/mask.h"
#include "knapformer/core/util/error.h"
#include "knapformer/core/util/text_reader.h"

namespace knapformer {
namespace {

constexpr int64_t kMaxTokens = INT32_MAX;
constexpr size_t kMaxParts = 1'000'000;

/// Parts of a sequence by their numbers: [first, end).
struct PartRange {
  size_t first = 0, end = 0;
};

/// "c120 f1024@0": parts one after another.
class Parts {
 public:
  bool read(TextReader& reader) {
    do {
      if (!read_word(reader)) return false;
    } while (reader.accept(' '));
    return reader.at_end();
  }

  /// Nothing where a part sees one that there is not.
  std::optional<std::vector<MaskRun>> runs() const {
    std::vector<MaskRun> runs;
    for (size_t p = 0; p < parts_.size(); ++p) {
      MaskRun& run = runs.emplace_back(MaskRun{.num_queries = first_tokens_[p + 1] - first_tokens_[p], .keys = {}});
      const auto see = [&](size_t first, size_t end) {
        if (first < end) add(run.keys, {.first = first_tokens_[first], .end = first_tokens_[end]});
      };
      bool seen_own = false;
      const auto see_own = [&] {
        const int64_t first = first_tokens_[p];
        if (!std::exchange(seen_own, true))
          add(run.keys, {.first = first,
                         .end = parts_[p].is_causal ? first + 1 : first_tokens_[p + 1],
                         .first_moves = false,
                         .end_moves = parts_[p].is_causal});
      };
      for (const PartRange& range : parts_[p].seen) {
        if (range.end > parts_.size()) return std::nullopt;
        see(range.first, std::min(range.end, p));
        if (range.end > p) see_own();
        see(std::max(range.first, p + 1), range.end);
      }
      see_own();
    }
    return runs;
  }

 private:
  struct Part {
    bool is_causal = false;
    std::vector<PartRange> seen;  // beside itself; ascending
  };

  /// Joins the range to the one before where this ends at its first key.
  static void add(std::vector<KeyRange>& keys, const KeyRange& range) {
    if (!keys.empty() && keys.back().end == range.first && !keys.back().end_moves) {
      keys.back().end = range.end;
      keys.back().end_moves = range.end_moves;
    } else {
      keys.push_back(range);
    }
  }

  bool add_part(std::optional<int64_t> num_tokens, Part part) {
    if (!num_tokens || parts_.size() == kMaxParts) return false;
    parts_.push_back(std::move(part));
    first_tokens_.push_back(first_tokens_.back() + *num_tokens);
    return first_tokens_.back() <= kMaxTokens;
  }

  bool read_word(TextReader& reader) {
    if (reader.accept("clean:")) return read_chunks(reader, /*are_clean=*/true);
    if (reader.accept("noisy:")) return read_chunks(reader, /*are_clean=*/false);
    Part part{.is_causal = reader.accept('c'), .seen = {}};
    if (!part.is_causal && !reader.accept('f')) return false;
    const auto num_tokens = reader.number<int64_t>(1, kMaxTokens);
    if (!reader.accept('@')) {
      part.seen = {{.first = 0, .end = parts_.size()}};
    } else if (!reader.at_end() && !reader.next_is(' ')) {
      do {
        const auto first = reader.number<size_t>(part.seen.empty() ? 0 : part.seen.back().end, kMaxParts);
        const auto last = first && reader.accept('-') ? reader.number<size_t>(*first, kMaxParts) : first;
        if (!last) return false;
        part.seen.push_back({.first = *first, .end = *last + 1});
      } while (reader.accept(','));
    }
    return add_part(num_tokens, std::move(part));
  }

  /// "8x1560" behind "clean:" or "noisy:".
  bool read_chunks(TextReader& reader, bool are_clean) {
    const auto count = reader.number<size_t>(1, kMaxParts);
    if (!count || !reader.accept('x')) return false;
    const auto num_tokens = reader.number<int64_t>(1, kMaxTokens);
    if (are_clean ? clean_.has_value() : clean_ && clean_->end - clean_->first != *count) return false;
    if (are_clean) clean_ = {.first = parts_.size(), .end = parts_.size() + *count};
    if (!clean_) return false;
    for (size_t i = 0; i < *count; ++i) {
      if (!add_part(num_tokens, {.is_causal = false, .seen = {{.first = 0, .end = clean_->first + i}}})) return false;
    }
    return true;
  }

  std::vector<Part> parts_;
  std::vector<int64_t> first_tokens_ = {0};
  std::optional<PartRange> clean_;
};

/// "120=0-1+;1024=0-1144,2000-2010": runs of queries with their keys.
std::optional<std::vector<MaskRun>> read_ranges(TextReader& reader) {
  std::vector<MaskRun> runs;
  int64_t seq_len = 0, most_keys = 0;
  do {
    const auto num_queries = reader.number<int64_t>(1, kMaxTokens);
    if (!num_queries || !reader.accept('=')) return std::nullopt;
    MaskRun& run = runs.emplace_back(MaskRun{.num_queries = *num_queries, .keys = {}});
    seq_len += *num_queries;
    if (reader.at_end() || reader.next_is(';')) continue;
    do {
      KeyRange range;
      const auto first = reader.number<int64_t>(0, kMaxTokens);
      range.first_moves = reader.accept('+');
      if (!first || !reader.accept('-')) return std::nullopt;
      const auto end = reader.number<int64_t>(*first + 1, kMaxTokens);
      range.end_moves = reader.accept('+');
      if (!end) return std::nullopt;
      range.first = *first;
      range.end = *end;
      // Ranges must stay apart, and have keys, to the last query.
      const int64_t moved = *num_queries - 1;
      if (range.first_moves && !range.end_moves && range.first + moved >= range.end) return std::nullopt;
      if (!run.keys.empty()) {
        const KeyRange& before = run.keys.back();
        const int64_t end_before = before.end + (before.end_moves ? moved : 0);
        const int64_t first_then = range.first + (range.first_moves ? moved : 0);
        if (before.end > range.first || end_before > first_then) return std::nullopt;
      }
      most_keys = std::max(most_keys, range.end + (range.end_moves ? moved : 0));
      run.keys.push_back(range);
    } while (reader.accept(','));
  } while (reader.accept(';'));
  const bool is_good = reader.at_end() && seq_len <= kMaxTokens && most_keys <= seq_len;
  return is_good ? std::optional(std::move(runs)) : std::nullopt;
}

/// Of a text that is to be a written mask; nothing where it is malformed.
std::optional<std::vector<MaskRun>> written_runs(std::string_view text) {
  TextReader reader(text);
  if (reader.accept("ranges:")) return read_ranges(reader);
  Parts parts;
  return parts.read(reader) ? parts.runs() : std::nullopt;
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

}  // namespace knapformer
