// The packing kernel: moves rows by a list of copies, in one launch, however many tensors and peers there are.
//
// This one source is compiled with the project, where a loop takes the place of threads, and at run time by NVRTC for
// the GPU that is there (cuda_kernel.h). So it is plain C++ that includes nothing, and what a GPU will run is tested on
// the CPU. Addresses are numbers, in the memory that the kernel sees.
//
//   work  = | number of copies | Copy ... |    (in the arguments of the launch, or in the device's memory)
//   tiles = | those of the first copy | of the second | ... |
//
// A block of kThreads threads moves one tile: kThreads x kPerThread words of a copy, row by row.
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
/// The most copies in the arguments of a launch, which may have 4096 bytes.
constexpr int kMaxCopiesInArguments = 63;

/// An address in the memory that the kernel sees.
using Address = unsigned long long;
using Index = long long;

using Word1 = unsigned char;
using Word2 KNAPFORMER_ALIASES = unsigned short;
using Word4 KNAPFORMER_ALIASES = unsigned int;
using Word8 KNAPFORMER_ALIASES = unsigned long long;
struct KNAPFORMER_ALIASES Word16 {
  alignas(16) unsigned long long low;
  unsigned long long high;
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

struct alignas(16) Work {
  int num_copies = 0;
  int unused[3] = {};
  Copy copies[kMaxCopiesInArguments];  // more in the device's memory
};

static_assert(sizeof(Copy) == 64 && sizeof(Work) == 16 + 64 * kMaxCopiesInArguments);

KNAPFORMER_KERNEL Index at_index(Address index, Index i) {
  return index == 0 ? i : reinterpret_cast<const Index*>(index)[i];
}

/// Where the words of a tile lie. In 32 bits but for the tile's first word: so words share one reciprocal,
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

/// What one thread does.
KNAPFORMER_KERNEL void run_thread(const Work& work, int tile, int thread) {
  const Copy* copies = work.copies;
  for (int count = work.num_copies; count > 1;) {  // the last copy whose tiles begin at `tile` or before
    const int half = count / 2;
    if (copies[half].first_tile <= tile) copies += half;
    count -= half;
  }
  const Copy& copy = *copies;
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
extern "C" __global__ void __launch_bounds__(knapformer::packing::kThreads, knapformer::packing::kMinBlocks)
    knapformer_move_rows(const __grid_constant__ knapformer::packing::Work work) {
  knapformer::packing::run_thread(work, static_cast<int>(blockIdx.x), static_cast<int>(threadIdx.x));
}

extern "C" __global__ void __launch_bounds__(knapformer::packing::kThreads, knapformer::packing::kMinBlocks)
    knapformer_move_rows_by_table(const knapformer::packing::Work* work) {
  knapformer::packing::run_thread(*work, static_cast<int>(blockIdx.x), static_cast<int>(threadIdx.x));
}
#endif
