#include "knapformer/torch/exchange/copies.h"

#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/index_select.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <string>

#include "knapformer/core/util/error.h"
#include "knapformer/torch/exchange/cuda_kernel.h"

namespace knapformer {
namespace {

packing::Address address_of(const void* pointer) { return reinterpret_cast<packing::Address>(pointer); }

int to_int(int64_t value) {
  KNAPFORMER_ASSERT(value >= 0 && value <= std::numeric_limits<int>::max());
  return static_cast<int>(value);
}

/// Copies rows [begin, end) of one word: one load and one store each. Side features are often that narrow. By value,
/// here and below: what is written might be bytes of a Copy in memory, so that the compiler would load its strides
/// again for every row.
template <class Word>
void copy_words(packing::Copy c, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    *reinterpret_cast<Word*>(c.to + packing::at_index(c.to_index, row) * c.to_stride) =
        *reinterpret_cast<const Word*>(c.from + packing::at_index(c.from_index, row) * c.from_stride);
  }
}

/// Copies rows [begin, end), as many at once as lie side by side at both ends.
void copy_rows(packing::Copy c, int64_t begin, int64_t end) {
  if (c.num_words == 1 && c.word_bytes == 4) return copy_words<packing::Word4>(c, begin, end);
  if (c.num_words == 1 && c.word_bytes == 8) return copy_words<packing::Word8>(c, begin, end);
  if (c.num_words == 1 && c.word_bytes == 16) return copy_words<packing::Word16>(c, begin, end);
  const int64_t width = int64_t{c.num_words} * c.word_bytes;
  const bool dense = c.from_stride == width && c.to_stride == width;
  for (int64_t row = begin, num_rows = 1; row < end; row += num_rows, num_rows = 1) {
    const int64_t from = packing::at_index(c.from_index, row), to = packing::at_index(c.to_index, row);
    while (dense && row + num_rows < end && packing::at_index(c.from_index, row + num_rows) == from + num_rows &&
           packing::at_index(c.to_index, row + num_rows) == to + num_rows) {
      ++num_rows;
    }
    std::memcpy(reinterpret_cast<void*>(c.to + to * c.to_stride),
                reinterpret_cast<const void*>(c.from + from * c.from_stride), static_cast<size_t>(num_rows * width));
  }
}

void copy_on_cpu(const packing::Copy& copy) {
  constexpr int64_t kBytesWorthAThread = 256 << 10;
  const int64_t rows_worth_a_thread = kBytesWorthAThread / (int64_t{copy.num_words} * copy.word_bytes) + 1;
  at::parallel_for(0, copy.num_rows, rows_worth_a_thread,
                   [&](int64_t begin, int64_t end) { copy_rows(copy, begin, end); });
}

/// A tensor over memory of the device, which it does not own.
at::Tensor view_of(packing::Address address, at::IntArrayRef shape, at::IntArrayRef strides, at::ScalarType dtype,
                   at::Device device) {
  return at::for_blob(reinterpret_cast<void*>(address), shape)
      .strides(strides)
      .options(at::TensorOptions(dtype).device(device))
      .target_device(device)
      .make_tensor();
}

void copy_by_aten(const packing::Copy& copy, at::Device device) {
  constexpr at::ScalarType kWords[] = {at::kByte, at::kShort, at::kInt, at::kLong};
  const int word_bytes = std::min(copy.word_bytes, 8);  // not every device has a type of 16
  const at::ScalarType dtype = kWords[std::countr_zero(static_cast<unsigned>(word_bytes))];
  const auto index_at = [&](packing::Address index) { return view_of(index, {copy.num_rows}, {1}, at::kLong, device); };
  const auto words_at = [&](packing::Address first, int64_t stride, packing::Address index) {
    // How many rows lie there is not known where an index chooses from them.
    const int64_t num_rows = index == 0 ? copy.num_rows : std::numeric_limits<int>::max();
    const int64_t num_words = int64_t{copy.num_words} * copy.word_bytes / word_bytes;
    return view_of(first, {num_rows, num_words}, {stride / word_bytes, 1}, dtype, device);
  };
  at::Tensor from = words_at(copy.from, copy.from_stride, copy.from_index);
  at::Tensor to = words_at(copy.to, copy.to_stride, copy.to_index);
  if (copy.to_index == 0 && copy.from_index != 0) {
    at::index_select_out(to, from, 0, index_at(copy.from_index));
  } else if (copy.to_index == 0) {
    to.copy_(from);
  } else {
    if (copy.from_index != 0) from = from.index_select(0, index_at(copy.from_index));
    to.index_copy_(0, index_at(copy.to_index), from);
  }
}

using MoveRows = void(const at::Tensor&, const at::Tensor&, int64_t, int64_t);

const c10::TypedOperatorHandle<MoveRows>& move_rows() {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("knapformer::move_rows", "").typed<MoveRows>();
  return op;
}

void move_rows_cpu(const at::Tensor&, const at::Tensor& work, int64_t num_tiles, int64_t) {
  const auto& list = *static_cast<const packing::Work*>(work.const_data_ptr());
  for (int tile = 0; tile < num_tiles; ++tile) {
    for (int thread = 0; thread < packing::kThreads; ++thread) packing::run_thread(list, tile, thread);
  }
}

void move_rows_cuda(const at::Tensor& wire, const at::Tensor& work, int64_t num_tiles, int64_t) {
  CudaKernel::on(wire.device()).launch(work, num_tiles);
}

}  // namespace

void Copies::add(Rows from, int64_t from_byte, Rows to, int64_t to_byte, int64_t width, int64_t num_rows) {
  if (width == 0 || num_rows == 0) return;
  packing::Copy copy{.from = address_of(from.first + from_byte),
                     .to = address_of(to.first + to_byte),
                     .from_index = address_of(from.index),
                     .to_index = address_of(to.index),
                     .from_stride = from.stride,
                     .to_stride = to.stride,
                     .num_rows = to_int(num_rows)};
  // The widest word that divides all of these.
  const auto all = static_cast<int64_t>(copy.from | copy.to) | width | from.stride | to.stride | kMaxWordBytes;
  copy.word_bytes = to_int(all & -all);
  copy.num_words = to_int(width / copy.word_bytes);
  list_.push_back(copy);
  num_bytes_ += width * num_rows;
}

void Copies::run(ExchangeEngine engine, const at::Tensor& wire) {
  if (engine == ExchangeEngine::kKernel) return launch(wire);
  for (const packing::Copy& copy : list_) {
    engine == ExchangeEngine::kCpu ? copy_on_cpu(copy) : copy_by_aten(copy, wire.device());
  }
}

void Copies::launch(const at::Tensor& wire) {
  if (list_.empty()) return;
  int64_t num_tiles = 0;
  for (packing::Copy& copy : list_) {
    copy.first_tile = to_int(num_tiles);
    num_tiles += (int64_t{copy.num_rows} * copy.num_words + packing::kTile - 1) / packing::kTile;
  }
  const size_t num_copies_bytes = list_.size() * sizeof(packing::Copy);
  const size_t num_bytes = std::max(sizeof(packing::Work), offsetof(packing::Work, copies) + num_copies_bytes);
  // A list that does not fit into the launch's arguments is copied to the device first, without a wait.
  const bool by_table = num_bytes > sizeof(packing::Work) && !wire.is_cpu();
  const at::Tensor host =
      at::empty({static_cast<int64_t>(num_bytes)}, at::TensorOptions(at::kByte).pinned_memory(by_table));
  auto& work = *static_cast<packing::Work*>(host.mutable_data_ptr());
  work.num_copies = to_int(static_cast<int64_t>(list_.size()));
  std::memcpy(static_cast<void*>(work.copies), list_.data(), num_copies_bytes);
  move_rows().call(wire, by_table ? host.to(wire.device(), /*non_blocking=*/true) : host, to_int(num_tiles),
                   num_bytes_);
}

ExchangeEngine engine_for(at::Device device) {
  if (device.is_cpu()) return ExchangeEngine::kCpu;
  if (!move_rows().hasKernelForDispatchKey(c10::computeDispatchKey({}, {}, device))) return ExchangeEngine::kDevice;
  if (!device.is_cuda()) return ExchangeEngine::kKernel;
  const std::string& error = CudaKernel::on(device).error();
  if (error.empty()) return ExchangeEngine::kKernel;
  TORCH_WARN_ONCE("knapformer: exchanges are packed by several operations in place of one kernel: ", error);
  return ExchangeEngine::kDevice;
}

// A fragment, as exchange.cpp defines the library.
TORCH_LIBRARY_FRAGMENT(knapformer, library) {
  library.def("move_rows(Tensor(a!) wire, Tensor work, int num_tiles, int num_bytes) -> ()");
  library.impl("move_rows", c10::DispatchKey::CPU, &move_rows_cpu);
  library.impl("move_rows", c10::DispatchKey::CUDA, &move_rows_cuda);
}

}  // namespace knapformer
