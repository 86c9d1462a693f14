// Random numbers that are the same on every machine.
#pragma once

#include <bit>
#include <cstdint>

namespace knapformer {

/// A counter-based generator: the n-th number is SplitMix64's output function (Steele et al., 2014) of key + n * gamma.
class Random {
 public:
  explicit Random(uint64_t key) : state_(key) {}

  static constexpr uint64_t kGamma = 0x9E3779B97F4A7C15u;
  static uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }

  uint64_t next() { return mix(state_ += kGamma); }
  /// Uniform in [0, n).
  int64_t below(int64_t n) { return static_cast<int64_t>((next() >> 32) * static_cast<uint64_t>(n) >> 32); }
  int32_t below(int32_t n) { return static_cast<int32_t>(below(int64_t{n})); }
  /// Uniform in [0, 1), 53 bits.
  double uniform() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }
  /// Exponentially distributed with mean 1, to about 1 %: -ln(u) from the bits of u, in plain arithmetic, since the
  /// standard library's logarithm may round differently from machine to machine.
  double exponential() {
    const uint64_t bits = next() | 1;
    const int zeros = std::countl_zero(bits);
    const double y = static_cast<double>(bits << zeros >> 11) * 0x1.0p-52 - 1;  // u = 2^(-1 - zeros) (1 + y)
    const double log2 = y * (1.4142 + y * (-0.5717 + y * 0.1575));
    return (zeros + 1 - log2) * 0.6931471805599453;
  }

 private:
  uint64_t state_;
};

}  // namespace knapformer
