#include "knapformer/core/model/data_mix.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>

#include "knapformer/core/model/topology.h"
#include "knapformer/core/util/error.h"
#include "knapformer/core/util/random.h"
#include "knapformer/core/util/text_reader.h"

namespace knapformer {
namespace {

constexpr int32_t kSpatialCompression = 16;  // pixels a latent side, patch included
constexpr int32_t kMaxBatch = 1 << 20;
constexpr int32_t kMaxResolution = 1 << 16;
constexpr int32_t kMaxFrames = 1 << 16;
constexpr int64_t kMaxSamples = int64_t{1} << 24;  // of all ranks together

struct NamedMix {
  std::string_view name;
  std::string_view codes;
};

/// The three mixes of the paper's Table 1.
constexpr std::array<NamedMix, 3> kPublishedMixes = {{
    {"low", "g32b32i256f1s0"},
    {"mixed", "g16b4i256f1s0,g4b5i512f1s0,g4b5i1024f1s0,g8b1i2048f1s0"},
    {"joint",
     "g8b4i256f1s0,g2b5i512f1s0,g2b5i1024f1s0,g4b1i2048f1s0,g1b10i256f4s0,g3b1i512f4s0,g8b2i256f85s1,g4b1i512f85s1"},
}};

[[noreturn]] void throw_malformed(const TextReader& reader, std::string_view expected) {
  reader.fail("data", text("'low', 'mixed', 'joint', or codes like 'g8b4i256f1s0' joined by commas: ", expected));
}

DataCode parse_code(TextReader& reader) {
  const auto field = [&](char letter, int32_t min, int32_t max) {
    if (!reader.accept(letter)) throw_malformed(reader, text("'", letter, "'"));
    const std::optional<int32_t> value = reader.number(min, max);
    if (!value) throw_malformed(reader, text("an integer from ", min, " to ", max, " after '", letter, "'"));
    return *value;
  };
  DataCode code;
  code.num_ranks = field('g', 1, kMaxRanks);
  code.batch_size = field('b', 1, kMaxBatch);
  code.resolution = field('i', 1, kMaxResolution);
  code.num_frames = field('f', 1, kMaxFrames);
  code.smooth = field('s', 0, 1) == 1;
  return code;
}

}  // namespace

int64_t DataCode::visual_tokens() const {
  const int64_t side = std::max(1, resolution / kSpatialCompression);
  // 17 pixel frames are 5 latent ones: a factor of 3.4, kept in integers so that 85 frames are 25 on any machine.
  const int64_t frames = smooth ? std::max(1, num_frames * 5 / 17) : num_frames;
  return side * side * frames;
}

DataMix DataMix::parse(std::string_view data, double resolution_scale, int64_t max_text_tokens) {
  if (!std::isfinite(resolution_scale) || resolution_scale <= 0) {
    throw_argument("scale", resolution_scale, "a positive finite number");
  }
  if (max_text_tokens < 0 || max_text_tokens > 1 << 20)
    throw_argument("max_text_tokens", max_text_tokens, "0 to 1048576");
  const auto named = std::ranges::find(kPublishedMixes, data, &NamedMix::name);
  const std::string_view codes = named == kPublishedMixes.end() ? data : named->codes;

  DataMix mix;
  mix.max_text_tokens_ = max_text_tokens;
  TextReader reader(codes);
  int64_t num_ranks = 0;
  do {
    reader.skip_spaces();
    DataCode code = parse_code(reader);
    const double scaled = std::floor(code.resolution / resolution_scale);
    code.resolution = static_cast<int32_t>(std::clamp(scaled, 1.0, double{kMaxResolution}));
    num_ranks += code.num_ranks;
    mix.codes_.push_back(code);
    reader.skip_spaces();
  } while (reader.accept(','));
  if (!reader.at_end()) throw_malformed(reader, "',' or the end");
  if (num_ranks > kMaxRanks)
    throw_argument("data", text("codes for ", num_ranks, " ranks"), text("at most ", kMaxRanks));
  mix.num_ranks_ = static_cast<int32_t>(num_ranks);
  return mix;
}

std::vector<std::string_view> DataMix::names() {
  std::vector<std::string_view> names;
  for (const NamedMix& mix : kPublishedMixes) names.push_back(mix.name);
  return names;
}

std::string DataMix::str() const {
  std::string out;
  for (const DataCode& c : codes_) {
    if (!out.empty()) out += ',';
    out += text('g', c.num_ranks, 'b', c.batch_size, 'i', c.resolution, 'f', c.num_frames, 's', c.smooth ? 1 : 0);
  }
  return out;
}

void DataMix::check_divides(int64_t num_ranks) const {
  if (num_ranks < 1 || num_ranks > kMaxRanks || num_ranks % num_ranks_ != 0) {
    throw_argument("ranks", num_ranks, text("a positive multiple of the ", num_ranks_, " ranks of data mix ", str()));
  }
}

const DataCode& DataMix::code_of(Rank rank) const {
  int32_t r = rank.value % num_ranks_;
  for (const DataCode& code : codes_) {
    if (r < code.num_ranks) return code;
    r -= code.num_ranks;
  }
  KNAPFORMER_ASSERT(false);
}

std::vector<Sample> DataMix::draw(uint64_t seed, int64_t step, Rank rank) const {
  if (rank.value < 0) throw_argument("rank", rank.value, "at least 0");
  const DataCode& code = code_of(rank);
  const auto mix = [](uint64_t z) { return Random::mix(z + Random::kGamma); };
  Random random(mix(mix(mix(seed) + static_cast<uint64_t>(step)) + static_cast<uint64_t>(rank.value)));
  const double factor = 0.96 + 0.08 * random.uniform();
  const auto visual = static_cast<int64_t>(static_cast<double>(code.visual_tokens()) * factor);
  std::vector<Sample> samples(static_cast<size_t>(code.batch_size));
  for (Sample& sample : samples) {
    // A tiny image may round down to nothing; a sample has at least one visual token.
    sample = {.text_tokens = random.below(max_text_tokens_ + 1), .visual_tokens = std::max<int64_t>(1, visual)};
  }
  return samples;
}

std::vector<std::vector<int64_t>> DataMix::draw_lengths(uint64_t seed, int64_t step, int32_t num_ranks) const {
  check_divides(num_ranks);
  int64_t num_samples = 0;
  for (const DataCode& code : codes_) num_samples += int64_t{code.num_ranks} * code.batch_size;
  num_samples *= num_ranks / num_ranks_;
  if (num_samples > kMaxSamples)
    throw_argument("data", text(num_samples, " samples on ", num_ranks, " ranks"), text("at most ", kMaxSamples));
  std::vector<std::vector<int64_t>> lens(static_cast<size_t>(num_ranks));
  for (int32_t r = 0; r < num_ranks; ++r) {
    for (const Sample& sample : draw(seed, step, Rank(r))) lens[r].push_back(sample.num_tokens());
  }
  return lens;
}

}  // namespace knapformer
