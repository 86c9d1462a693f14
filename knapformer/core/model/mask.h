// Attention masks: how many (query, key) pairs attention computes on a sequence, exactly.
//
//   full           every pair
//   causal         keys up to the query
//   prefix         the first `text_tokens` see each other; the rest is causal
//   block causal   text, then frames of `frame_tokens`: a token sees its own block and every block before it
//   window         keys from `left` before the query to `right` after it; a side below 0 is unlimited
//   density        this share of all pairs, no matter which: for kernels with masks of their own
//
// Text forms: "full", "causal", "prefix:77", "block_causal:77:1024" (text, frame), "window:512:0" (left, right),
// "density:0.25".
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace knapformer {

/// Consecutive queries of a sequence, and the run of keys that holds all that its mask lets them see.
struct QueryPart {
  int64_t first_query = 0, num_queries = 0;
  int64_t first_key = 0, num_keys = 0;

  bool operator==(const QueryPart&) const = default;
};

struct Mask {
  enum class Kind { kFull, kCausal, kPrefix, kBlockCausal, kWindow, kDensity };

  /// Every text form, for messages and help.
  static constexpr const char* kForms =
      "'full', 'causal', 'prefix:TEXT', 'block_causal:TEXT:FRAME' or 'window:LEFT:RIGHT' with counts of tokens "
      "(FRAME at least 1), or 'density:SHARE' with a share from 0 to 1";

  Kind kind = Kind::kFull;
  int64_t text_tokens = 0;   // prefix, block causal
  int64_t frame_tokens = 1;  // block causal
  int64_t left = -1;         // window
  int64_t right = -1;
  double density = 1;  // from 0 to 1

  /// Throws ArgumentError (argument "mask") where the text is malformed.
  static Mask parse(std::string_view text);
  std::string str() const;

  /// (query, key) pairs of a sequence. Text tokens beyond the end of the sequence do not count.
  int64_t pairs(int64_t seq_len) const { return pairs_before(seq_len, seq_len); }
  /// Those of the first `num_queries` queries.
  int64_t pairs_before(int64_t seq_len, int64_t num_queries) const;
  /// Cuts the queries of a sequence into consecutive parts with equally many pairs, to within those of one query. A
  /// part may be empty; its keys are, too.
  std::vector<QueryPart> query_parts(int64_t seq_len, int32_t num_parts) const;

  bool operator==(const Mask&) const = default;

 private:
  /// The end of the keys that a query up to `last` sees, and the first key that the query `first` sees.
  int64_t keys_end(int64_t seq_len, int64_t first, int64_t last) const;
  int64_t keys_begin(int64_t first) const;
};

}  // namespace knapformer
