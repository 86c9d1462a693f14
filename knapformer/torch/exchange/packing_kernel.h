// The packing kernel: moves rows by lists of copies and sums, in one launch, however many tensors and peers there are.
//
// This one source is compiled with the project, where a loop takes the place of threads, and at run time by NVRTC for
// the GPU that is there (cuda_kernel.h). So it is plain C++ that includes nothing, and what a GPU will run is tested on
// the CPU. Addresses are numbers, in the memory that the kernel sees.
//
//   work  = | Work | Copy ... | Sum ... | Source ... |     (in the arguments of the launch, or in the device's memory)
//   tiles = | those of the first copy | of the second | ... | of the first sum | ... |
//
// A block of kThreads threads moves one tile: kThreads x kPerThread words of a copy, or items of a sum, row by row.
#pragma once

#if defined(__CUDACC__)
#define KNAPFORMER_KERNEL __device__ inline
#define KNAPFORMER_ALIASES
#else
#define KNAPFORMER_KERNEL inline
#define KNAPFORMER_ALIASES __attribute__((may_alias))
#endif

namespace knapformer::packing {

constexpr int kThreads = 256;
constexpr int kPerThread = 4;
constexpr int kTile = kThreads * kPerThread;
/// On a multiprocessor at once, at least: so a thread may have 64 registers. Without a number ptxas spills some to have
/// more blocks there.
constexpr int kMinBlocks = 4;
/// The most bytes of work in the arguments of a launch, which may have 4096 bytes.
constexpr int kMaxArgumentBytes = 4080;

/// An address in the memory that the kernel sees.
using Address = unsigned long long;
using Index = long long;

/// The types that are added. Complex numbers are two items.
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

/// How items of a type lie in memory, and what they are added in: halves in float32.
struct FloatItems {
  using Total = float;
  static constexpr Index kBytes = 4;
  static KNAPFORMER_KERNEL float read(Address at) { return *reinterpret_cast<const Float*>(at); }
  static KNAPFORMER_KERNEL void write(Address at, float total) { *reinterpret_cast<Float*>(at) = total; }
};
struct DoubleItems {
  using Total = double;
  static constexpr Index kBytes = 8;
  static KNAPFORMER_KERNEL double read(Address at) { return *reinterpret_cast<const Double*>(at); }
  static KNAPFORMER_KERNEL void write(Address at, double total) { *reinterpret_cast<Double*>(at) = total; }
};
struct HalfItems {
  using Total = float;
  static constexpr Index kBytes = 2;
  static KNAPFORMER_KERNEL float read(Address at) { return float_of_half(*reinterpret_cast<const Word2*>(at)); }
  static KNAPFORMER_KERNEL void write(Address at, float total) {
    *reinterpret_cast<Word2*>(at) = static_cast<unsigned short>(half_of_float(total));
  }
};
struct BFloat16Items {
  using Total = float;
  static constexpr Index kBytes = 2;
  static KNAPFORMER_KERNEL float read(Address at) { return float_of_bfloat16(*reinterpret_cast<const Word2*>(at)); }
  static KNAPFORMER_KERNEL void write(Address at, float total) {
    *reinterpret_cast<Word2*>(at) = static_cast<unsigned short>(bfloat16_of_float(total));
  }
};

/// a / b of numbers that are not negative: in 32 bits where they fit, which is several times as fast on a GPU.
KNAPFORMER_KERNEL Index quotient(Index a, int b) {
  return a <= 0xffffffffLL ? static_cast<unsigned int>(a) / static_cast<unsigned int>(b) : a / b;
}

/// Copies the same columns, num_words words, of num_rows rows. Row i is read at `from` + j * `from_stride`, where j is
/// from_index[i], or i if from_index is 0. It is written likewise, at `to`.
struct Copy {
  Address from = 0, to = 0;
  Address from_index = 0, to_index = 0;  // of int64
  Index from_stride = 0, to_stride = 0;  // bytes
  int num_words = 0, word_bytes = 0;     // of a row; every address is a multiple of the word
  int num_rows = 0, first_tile = 0;
};

/// Rows that a sum may add. If the sum has places, these are the rows from first_place on.
struct Source {
  Address from = 0, from_index = 0;
  Index from_stride = 0;
  Index first_place = 0;
};

/// Each row of the result is the sum of the same row of all sources; or, with places, of the rows at its max_places
/// places, up to the first that is end_place. Terms are added to zero in the order of sources or places.
struct Sum {
  Address to = 0;
  Index to_stride = 0;
  Address places = 0;  // (num_rows, max_places) of int64; 0: none
  Index end_place = 0;
  int max_places = 0;
  int first_source = 0, num_sources = 0;
  Item item = Item::kFloat;
  int num_items = 0;  // of a row
  int num_rows = 0, first_tile = 0;
  int unused = 0;
};

struct Work {
  int num_copies = 0, num_sums = 0, num_sources = 0, num_tiles = 0;

  static constexpr Index kCopiesAt = 16;
  KNAPFORMER_KERNEL Index sums_at() const { return kCopiesAt + num_copies * static_cast<Index>(sizeof(Copy)); }
  KNAPFORMER_KERNEL Index sources_at() const { return sums_at() + num_sums * static_cast<Index>(sizeof(Sum)); }
};

static_assert(sizeof(Work) == 16 && sizeof(Copy) == 64 && sizeof(Sum) == 64 && sizeof(Source) == 32);

KNAPFORMER_KERNEL Index at_index(Address index, Index i) {
  return index == 0 ? i : reinterpret_cast<const Index*>(index)[i];
}

/// Where the words (or items) of a tile lie. In 32 bits but for the tile's first word: so words share one reciprocal,
/// and no call of a division comes between their reads, around which a GPU would spill what they have read.
struct RowsOfTile {
  struct Place {
    unsigned int row, word;
  };

  KNAPFORMER_KERNEL RowsOfTile(Index first, int num_words)
      : num_words_(static_cast<unsigned int>(num_words)),
        first_row_(static_cast<unsigned int>(quotient(first, num_words))) {
    first_word_ = static_cast<unsigned int>(first - static_cast<Index>(first_row_) * num_words);
  }
  KNAPFORMER_KERNEL Place at(int offset) const {
    const unsigned int word = first_word_ + static_cast<unsigned int>(offset), rows = word / num_words_;
    return {.row = first_row_ + rows, .word = word - rows * num_words_};
  }

 private:
  unsigned int num_words_;   // of a row, below 2^31
  unsigned int first_row_;   // of the tile, below 2^31
  unsigned int first_word_;  // in that row
};

template <class Word>
KNAPFORMER_KERNEL void copy_tile(const Copy& copy, Index first, int thread) {
  const RowsOfTile rows(first, copy.num_words);
  const auto num_rows = static_cast<unsigned int>(copy.num_rows);
  Address from[kPerThread], to[kPerThread];
  bool exists[kPerThread];
  for (int k = 0; k < kPerThread; ++k) {  // without a branch, so that no read of an index waits for another
    const auto [row, word] = rows.at(k * kThreads + thread);
    exists[k] = row < num_rows;
    const Index i = exists[k] ? row : num_rows - 1, byte = static_cast<Index>(word) * static_cast<Index>(sizeof(Word));
    from[k] = copy.from + at_index(copy.from_index, i) * copy.from_stride + byte;
    to[k] = copy.to + at_index(copy.to_index, i) * copy.to_stride + byte;
  }
  Word words[kPerThread] = {};
  for (int k = 0; k < kPerThread; ++k) {  // all reads are under way before the first write waits for its data
    if (exists[k]) words[k] = *reinterpret_cast<const Word*>(from[k]);
  }
  for (int k = 0; k < kPerThread; ++k) {
    if (exists[k]) *reinterpret_cast<Word*>(to[k]) = words[k];
  }
}

template <class Items>
KNAPFORMER_KERNEL void sum_tile(const Sum& sum, const Source* sources, Index first, int thread) {
  const RowsOfTile rows(first, sum.num_items);
  for (int k = 0; k < kPerThread; ++k) {
    const auto [row, item] = rows.at(k * kThreads + thread);
    if (row >= static_cast<unsigned int>(sum.num_rows)) return;
    const Index byte = item * Items::kBytes;
    typename Items::Total total = 0;
    const int num_terms = sum.places == 0 ? sum.num_sources : sum.max_places;
    for (int s = 0, term = 0; term < num_terms; ++term) {
      Index source_row = row;
      if (sum.places == 0) {
        s = term;
      } else {
        const Index place = reinterpret_cast<const Index*>(sum.places)[row * sum.max_places + term];
        if (place == sum.end_place) break;
        while (s + 1 < sum.num_sources && sources[s + 1].first_place <= place) ++s;  // places of a row ascend
        source_row = place - sources[s].first_place;
      }
      const Source& source = sources[s];
      total += Items::read(source.from + at_index(source.from_index, source_row) * source.from_stride + byte);
    }
    Items::write(sum.to + row * sum.to_stride + byte, total);
  }
}

/// The last of `count` descriptors whose tiles begin at `tile` or before.
template <class Descriptor>
KNAPFORMER_KERNEL const Descriptor& descriptor_of(const Descriptor* descriptors, int count, int tile) {
  int low = 0;
  while (count > 1) {
    const int half = count / 2;
    if (descriptors[low + half].first_tile <= tile) low += half;
    count -= half;
  }
  return descriptors[low];
}

/// What one thread does.
KNAPFORMER_KERNEL void run_thread(const unsigned char* bytes, int tile, int thread) {
  const Work& work = *reinterpret_cast<const Work*>(bytes);
  const auto* copies = reinterpret_cast<const Copy*>(bytes + Work::kCopiesAt);
  const auto* sums = reinterpret_cast<const Sum*>(bytes + work.sums_at());
  if (work.num_sums > 0 && tile >= sums[0].first_tile) {
    const Sum& sum = descriptor_of(sums, work.num_sums, tile);
    const Source* sources = reinterpret_cast<const Source*>(bytes + work.sources_at()) + sum.first_source;
    const Index first = static_cast<Index>(tile - sum.first_tile) * kTile;
    switch (sum.item) {
      case Item::kFloat:
        return sum_tile<FloatItems>(sum, sources, first, thread);
      case Item::kDouble:
        return sum_tile<DoubleItems>(sum, sources, first, thread);
      case Item::kHalf:
        return sum_tile<HalfItems>(sum, sources, first, thread);
      case Item::kBFloat16:
        return sum_tile<BFloat16Items>(sum, sources, first, thread);
    }
    return;
  }
  const Copy& copy = descriptor_of(copies, work.num_copies, tile);
  const Index first = static_cast<Index>(tile - copy.first_tile) * kTile;
  switch (copy.word_bytes) {
    case 16:
      return copy_tile<Word16>(copy, first, thread);
    case 8:
      return copy_tile<Word8>(copy, first, thread);
    case 4:
      return copy_tile<Word4>(copy, first, thread);
    case 2:
      return copy_tile<Word2>(copy, first, thread);
    default:
      return copy_tile<Word1>(copy, first, thread);
  }
}

}  // namespace knapformer::packing

#if defined(__CUDACC__)
struct alignas(16) KnapformerWork {
  unsigned char bytes[knapformer::packing::kMaxArgumentBytes];
};

extern "C" __global__ void __launch_bounds__(knapformer::packing::kThreads, knapformer::packing::kMinBlocks)
    knapformer_move_rows(const __grid_constant__ KnapformerWork work) {
  knapformer::packing::run_thread(work.bytes, static_cast<int>(blockIdx.x), static_cast<int>(threadIdx.x));
}

extern "C" __global__ void __launch_bounds__(knapformer::packing::kThreads, knapformer::packing::kMinBlocks)
    knapformer_move_rows_by_table(const unsigned char* work) {
  knapformer::packing::run_thread(work, static_cast<int>(blockIdx.x), static_cast<int>(threadIdx.x));
}
#endif
