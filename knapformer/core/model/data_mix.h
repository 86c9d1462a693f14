// Data mixes: seeded sequence lengths from data codes, as in the paper's simulator (Sec. 4.1).
//
// "gGbBiRfFsS": G ranks that each draw B samples of resolution R (pixels a side), F frames, S = 1 for a smooth video.
//   latent side    floor(R / 16)
//   latent frames  S = 1: max(1, floor(F / 3.4)); S = 0: F
//   visual tokens  side^2 * frames * U[0.96, 1.04], the factor is drawn once a batch (aspect ratio buckets)
//   text tokens    uniform integer in 0..392, drawn per sample
// Codes are joined with commas, assigned to ranks in order, and repeat over the world.
//
// Random numbers are counter-based: a batch depends on (seed, step, rank) alone. So a rank draws its own batch without
// those of other ranks, and every machine draws the same batch.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "knapformer/core/util/ids.h"

namespace knapformer {

struct DataCode {
  int32_t num_ranks = 0;
  int32_t batch_size = 0;  // samples a rank draws each step
  int32_t resolution = 0;  // pixels a side
  int32_t num_frames = 1;
  bool smooth = false;  // a video: compressed in time

  /// Before the aspect-ratio factor.
  int64_t visual_tokens() const;
  bool operator==(const DataCode&) const = default;
};

struct Sample {
  int64_t text_tokens = 0;
  int64_t visual_tokens = 0;

  int64_t num_tokens() const { return text_tokens + visual_tokens; }
  bool operator==(const Sample&) const = default;
};

class DataMix {
 public:
  static constexpr int64_t kMaxTextTokens = 392;

  /// `text` is data codes or the name of a published mix. `resolution_scale` divides the resolutions. Throws
  /// ArgumentError (argument "data") where the text is malformed or unknown.
  static DataMix parse(std::string_view text, double resolution_scale = 1.0, int64_t max_text_tokens = kMaxTextTokens);
  /// "low", "mixed", "joint".
  static std::vector<std::string_view> names();

  std::string str() const;
  std::span<const DataCode> codes() const { return codes_; }
  int32_t num_ranks() const { return num_ranks_; }
  int64_t max_text_tokens() const { return max_text_tokens_; }
  /// Throws ArgumentError where `num_ranks` is no multiple of the mix's ranks.
  void check_divides(int64_t num_ranks) const;

  std::vector<Sample> draw(uint64_t seed, int64_t step, Rank rank) const;
  /// Token counts of every rank's samples, 2^24 at most. Throws ArgumentError.
  std::vector<std::vector<int64_t>> draw_lengths(uint64_t seed, int64_t step, int32_t num_ranks) const;

 private:
  const DataCode& code_of(Rank rank) const;

  std::vector<DataCode> codes_;
  int32_t num_ranks_ = 0;
  int64_t max_text_tokens_ = kMaxTextTokens;
};

}  // namespace knapformer
