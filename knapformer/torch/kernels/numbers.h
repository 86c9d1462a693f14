// What kernels compute with, on a GPU and on the CPU: words and items in memory, halves in float32.
//
// Plain C++: compiled with the project, and at run time by NVRTC with the kernels that include it (cuda_kernel.h).
#pragma once

#if defined(__CUDACC__)
#define KNAPFORMER_KERNEL __device__ inline
#define KNAPFORMER_ALIASES
#else
#define KNAPFORMER_KERNEL inline
#define KNAPFORMER_ALIASES __attribute__((may_alias))
#endif

namespace knapformer::kernels {

/// An address in the memory that the kernel sees.
using Address = unsigned long long;
using Index = long long;

/// The types that kernels compute with.
enum class Item : int { kFloat, kDouble, kHalf, kBFloat16 };

using Word1 = unsigned char;
using Word2 KNAPFORMER_ALIASES = unsigned short;
using Word4 KNAPFORMER_ALIASES = unsigned int;
using Word8 KNAPFORMER_ALIASES = unsigned long long;
struct KNAPFORMER_ALIASES Word16 {
  alignas(16) unsigned long long low;
  unsigned long long high;
};
using Float KNAPFORMER_ALIASES = float;
using Double KNAPFORMER_ALIASES = double;
struct KNAPFORMER_ALIASES FloatPair {
  alignas(8) float first;
  float second;
};
struct KNAPFORMER_ALIASES DoublePair {
  alignas(16) double first;
  double second;
};

union FloatBits {
  unsigned int bits;
  float value;
};

KNAPFORMER_KERNEL float float_of_bits(unsigned int bits) {
  FloatBits both{.bits = bits};
  return both.value;
}
KNAPFORMER_KERNEL unsigned int bits_of_float(float value) {
  FloatBits both{.bits = 0};
  both.value = value;
  return both.bits;
}

/// `bits` without the lowest `count`, which is 1 to 31: rounded to nearest, ties to even.
KNAPFORMER_KERNEL unsigned int rounded_off(unsigned int bits, int count) {
  const unsigned int half = 1u << (count - 1), odd = (bits >> count) & 1u;
  return (bits + (half - 1u) + odd) >> count;
}

KNAPFORMER_KERNEL float float_of_bfloat16(unsigned int bits) { return float_of_bits(bits << 16); }
KNAPFORMER_KERNEL unsigned int bfloat16_of_float(float value) {
  const unsigned int bits = bits_of_float(value);
  return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded_off(bits, 16);
}

KNAPFORMER_KERNEL float float_of_half(unsigned int bits) {
  const unsigned int sign = (bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return float_of_bits(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  if (magnitude >= 0x400u) return float_of_bits(sign | ((magnitude << 13) + 0x38000000u));
  const float subnormal = static_cast<float>(magnitude) * 5.9604644775390625e-8f;  // 2^-24
  return float_of_bits(sign | bits_of_float(subnormal));
}
KNAPFORMER_KERNEL unsigned int half_of_float(float value) {
  const unsigned int bits = bits_of_float(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u;
  if (magnitude >= 0x47800000u) return sign | 0x7c00u;                                   // 65536 and more
  if (magnitude >= 0x38800000u) return sign | rounded_off(magnitude - 0x38000000u, 13);  // may round to infinity
  if (magnitude < 0x33000000u) return sign;                                              // below half of 2^-24
  const int shift = 126 - static_cast<int>(magnitude >> 23);
  return sign | rounded_off((magnitude & 0x7fffffu) | 0x800000u, shift);
}

// Two halves beside each other, the first in the lower bits. GPUs since capability 8.0 have one instruction for each
// function, which gives the same numbers, and some NaN for NaN.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
KNAPFORMER_KERNEL unsigned int bfloat16s_of_floats(float a, float b) {
  unsigned int both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(b), "f"(a));
  return both;
}
KNAPFORMER_KERNEL unsigned int halves_of_floats(float a, float b) {
  unsigned int both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(b), "f"(a));
  return both;
}
KNAPFORMER_KERNEL float float_of_lower_half(unsigned int both) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<unsigned short>(both)));
  return value;
}
#else
KNAPFORMER_KERNEL unsigned int bfloat16s_of_floats(float a, float b) {
  return bfloat16_of_float(a) | bfloat16_of_float(b) << 16;
}
KNAPFORMER_KERNEL unsigned int halves_of_floats(float a, float b) { return half_of_float(a) | half_of_float(b) << 16; }
KNAPFORMER_KERNEL float float_of_lower_half(unsigned int both) { return float_of_half(both & 0xffffu); }
#endif

/// How items of a type lie in memory, and what they are computed in: halves in float32.
///
/// A pair, which lies at a multiple of its size, is read and written at once.
struct FloatItems {
  using Total = float;
  static constexpr Index kBytes = 4;
  static KNAPFORMER_KERNEL float read(Address at) { return *reinterpret_cast<const Float*>(at); }
  static KNAPFORMER_KERNEL void write(Address at, float total) { *reinterpret_cast<Float*>(at) = total; }
  static KNAPFORMER_KERNEL void read_pair(Address at, float& a, float& b) {
    const auto pair = *reinterpret_cast<const FloatPair*>(at);
    a = pair.first;
    b = pair.second;
  }
  static KNAPFORMER_KERNEL void write_pair(Address at, float a, float b) { *reinterpret_cast<FloatPair*>(at) = {a, b}; }
};
struct DoubleItems {
  using Total = double;
  static constexpr Index kBytes = 8;
  static KNAPFORMER_KERNEL double read(Address at) { return *reinterpret_cast<const Double*>(at); }
  static KNAPFORMER_KERNEL void write(Address at, double total) { *reinterpret_cast<Double*>(at) = total; }
  static KNAPFORMER_KERNEL void read_pair(Address at, double& a, double& b) {
    const auto pair = *reinterpret_cast<const DoublePair*>(at);
    a = pair.first;
    b = pair.second;
  }
  static KNAPFORMER_KERNEL void write_pair(Address at, double a, double b) {
    *reinterpret_cast<DoublePair*>(at) = {a, b};
  }
};
struct HalfItems {
  using Total = float;
  static constexpr Index kBytes = 2;
  static KNAPFORMER_KERNEL float read(Address at) { return float_of_lower_half(*reinterpret_cast<const Word2*>(at)); }
  static KNAPFORMER_KERNEL void write(Address at, float total) {
    *reinterpret_cast<Word2*>(at) = static_cast<unsigned short>(halves_of_floats(total, 0.0f));
  }
  static KNAPFORMER_KERNEL void read_pair(Address at, float& a, float& b) {
    const auto pair = *reinterpret_cast<const Word4*>(at);
    a = float_of_lower_half(pair);
    b = float_of_lower_half(pair >> 16);
  }
  static KNAPFORMER_KERNEL void write_pair(Address at, float a, float b) {
    *reinterpret_cast<Word4*>(at) = halves_of_floats(a, b);
  }
};
struct BFloat16Items {
  using Total = float;
  static constexpr Index kBytes = 2;
  static KNAPFORMER_KERNEL float read(Address at) { return float_of_bfloat16(*reinterpret_cast<const Word2*>(at)); }
  static KNAPFORMER_KERNEL void write(Address at, float total) {
    *reinterpret_cast<Word2*>(at) = static_cast<unsigned short>(bfloat16s_of_floats(total, 0.0f));
  }
  static KNAPFORMER_KERNEL void read_pair(Address at, float& a, float& b) {
    const auto pair = *reinterpret_cast<const Word4*>(at);
    a = float_of_bfloat16(pair & 0xffffu);
    b = float_of_bfloat16(pair >> 16);
  }
  static KNAPFORMER_KERNEL void write_pair(Address at, float a, float b) {
    *reinterpret_cast<Word4*>(at) = bfloat16s_of_floats(a, b);
  }
};

/// a / b of numbers that are not negative: in 32 bits where they fit, which is several times as fast on a GPU.
KNAPFORMER_KERNEL Index quotient(Index a, int b) {
  return a <= 0xffffffffLL ? static_cast<unsigned int>(a) / static_cast<unsigned int>(b) : a / b;
}

}  // namespace knapformer::kernels
