// Attention masks: which keys each query of a sequence sees, and so how many (query, key) pairs attention computes.
//
//   full           every pair
//   causal         keys up to the query
//   prefix         the first `text_tokens` see each other; the rest is causal
//   block causal   text, then frames of `frame_tokens`: a token sees its own block and every block before it
//   window         keys from `left` before the query to `right` after it
//   density        this share of all pairs, no matter which: for kernels with masks of their own
//   written        the runs of queries of one length, each with its ranges of keys
//
// Text forms: "full", "causal", "prefix:77", "block_causal:77:1024" (text, frame), "window:512:0" (left, right),
// "density:0.25". Of a sequence with these tokens alone:
//
//   "c120 f1024 f4096@0 clean:8x1560 noisy:8x1560"   parts, causal or full inside, in order. A part sees all parts
//       before it as well, or those whose numbers (from 0) stand behind its @: "f4096@0,2-3"; none: "f4096@".
//       clean:8x1560 stands for 8 full parts; of as many noisy ones each sees the clean ones before its own, and what
//       lies before these.
//   "ranges:120=0-1+;1024=0-1144,2000-2010"   runs of queries. Of 120 queries the first sees the keys [0, 1), and with
//       each query an end with + moves on by a key.
#pragma once

#include <cstdint>
#include <memory>
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

/// The keys [first, end) that the first query of a run sees. With each query behind it an end that moves is one key
/// further on. No query's range is empty.
struct KeyRange {
  int64_t first = 0, end = 0;
  bool first_moves = false, end_moves = false;

  bool operator==(const KeyRange&) const = default;
};

/// Consecutive queries, and the ranges of keys that they see: apart from each other, ascending. There may be none.
struct MaskRun {
  int64_t num_queries = 0;
  std::vector<KeyRange> keys;

  /// The (query, key) pairs of its first queries.
  int64_t pairs_before(int64_t count) const;
  /// Its queries [first, first + count).
  MaskRun part(int64_t first, int64_t count) const;
  bool operator==(const MaskRun&) const = default;
};

struct Mask {
  enum class Kind { kFull, kCausal, kPrefix, kBlockCausal, kWindow, kDensity, kWritten };

  /// Every text form, for messages and help.
  static constexpr const char* kForms =
      "'full', 'causal', 'prefix:TEXT', 'block_causal:TEXT:FRAME' or 'window:LEFT:RIGHT' with counts of tokens "
      "(FRAME at least 1), 'density:SHARE' with a share from 0 to 1, parts of a sequence such as 'c120 f1024 f4096@0 "
      "clean:8x1560 noisy:8x1560', or 'ranges:120=0-1+;1024=0-1144'";

  Kind kind = Kind::kFull;
  int64_t text_tokens = 0;   // prefix, block causal
  int64_t frame_tokens = 1;  // block causal
  int64_t left = 0;          // window
  int64_t right = 0;
  double density = 1;  // from 0 to 1

  struct Written {
    std::string text;
    int64_t seq_len = 0, pairs = 0;
    std::vector<MaskRun> runs;
  };
  std::shared_ptr<const Written> written = nullptr;

  /// Throws ArgumentError (argument "mask") where the text is malformed.
  static Mask parse(std::string_view text);
  std::string str() const;

  /// (query, key) pairs of a sequence. Text tokens beyond the end of the sequence do not count. Throws ArgumentError
  /// (argument "mask") for a written mask of another length.
  int64_t pairs(int64_t seq_len) const;
  /// Those of these queries.
  int64_t pairs_of(int64_t seq_len, const QueryPart& part) const;
  /// What each query sees. By a density, all keys. Throws as pairs does.
  std::vector<MaskRun> runs(int64_t seq_len) const;
  /// Cuts the queries of a sequence into consecutive parts with equally many pairs, to within those of one query. A
  /// part may be empty; its keys are, too.
  std::vector<QueryPart> query_parts(int64_t seq_len, int32_t num_parts) const;

  /// Whether each query of such a sequence sees the same keys. Densities say only how many: then whether these are.
  bool sees_as(const Mask& other, int64_t seq_len) const;
  bool operator==(const Mask& other) const;

 private:
  void check_length(int64_t seq_len) const;
};

}  // namespace knapformer
