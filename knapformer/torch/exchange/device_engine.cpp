// The engine for any device. The rows of each segment are gathered into a matrix of bytes in the buffer's order, and
// received rows are gathered out of such a matrix. Own rows belong to both matrices, so they need no copy between the
// two.
//
// Each slot's bytes are moved as the widest words that divide the length of its rows and the place where they begin.
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>

#include <numeric>

#include "knapformer/core/util/error.h"
#include "knapformer/torch/exchange/duplicates.h"
#include "knapformer/torch/exchange/engine.h"

namespace knapformer {
namespace {

/// A dtype of that many bytes, by which words are copied.
at::ScalarType dtype_of_word(int64_t num_bytes) {
  switch (num_bytes) {
    case 16:
      return at::kComplexDouble;
    case 8:
      return at::kLong;
    case 4:
      return at::kInt;
    case 2:
      return at::kShort;
    default:
      return at::kByte;
  }
}

/// Not every device has complex numbers of 16 bytes.
int64_t widest_word_on(at::Device device) { return device.is_mps() || device.is_xpu() ? 8 : kMaxWordBytes; }

/// (rows, words): columns of rows that lie in a flat tensor of bytes, from `first_byte` on.
at::Tensor columns_of(const at::Tensor& bytes, int64_t first_byte, int64_t num_rows, int64_t row_bytes,
                      int64_t num_bytes, int64_t word) {
  return bytes.view(dtype_of_word(word))
      .as_strided({num_rows, num_bytes / word}, {row_bytes / word, 1}, first_byte / word);
}

/// (rows, words): the rows of a tensor, each of them dense.
at::Tensor rows_as_words(const at::Tensor& tensor, int64_t row_bytes, int64_t stride_bytes, int64_t word) {
  const auto item_bytes = static_cast<int64_t>(tensor.itemsize());
  return tensor.as_strided({tensor.size(0), row_bytes / item_bytes}, {stride_bytes / item_bytes, 1})
      .view(dtype_of_word(word));
}

class DeviceEngine final : public Engine {
 public:
  explicit DeviceEngine(ExchangeCall& call) : call_(call), widest_word_(widest_word_on(call.device())) {}

  void pack() override {
    std::vector<at::Tensor> gathered(call_.segments().size());
    for (size_t s = 0; s < gathered.size(); ++s) {
      if (call_.segments()[s].send.heads_shared()) {
        pack_shared(s);
      } else {
        gathered[s] = gather(s);
      }
    }
    interleave(gathered);
  }

  void move_own() override {}

  void unpack() override {
    call_.allocate_outputs();
    for (const ExchangeCall::LocalRows& rows : call_.local_rows()) rows.to.copy_(rows.from);
    for (size_t s = 0; s < call_.segments().size(); ++s) {
      if (call_.segments()[s].recv.heads_shared()) {
        unpack_shared(s);
      } else {
        unpack_whole(s);
      }
    }
  }

 private:
  int64_t word_of(const Slot& slot) const { return std::min(slot.word_bytes, widest_word_); }

  /// The word by which an input is read. It also divides the place where the input begins and the stride between its
  /// rows.
  int64_t input_word_of(const Slot& slot) const {
    const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(slot.input.const_data_ptr()));
    const int64_t offset = slot.input.storage_offset() * static_cast<int64_t>(slot.input.itemsize());
    return std::gcd(std::gcd(word_of(slot), slot.input_stride_bytes), std::gcd(address, offset));
  }
  at::Tensor input_rows(const Slot& slot, int64_t word) const {
    return rows_as_words(slot.input, slot.input_row_bytes, slot.input_stride_bytes, word);
  }

  /// Whether a segment's rows of all peers lie one after another in the buffer.
  bool is_one_matrix(int64_t row_bytes) const { return call_.segments().size() == 1 && row_bytes % kMaxWordBytes == 0; }

  /// The blocks of a segment that have rows.
  static std::vector<WireBlock> blocks_of(size_t segment, const std::vector<WireBlock>& blocks) {
    std::vector<WireBlock> found;
    std::ranges::copy_if(blocks, std::back_inserter(found),
                         [&](const WireBlock& block) { return block.segment == segment && block.num_rows > 0; });
    return found;
  }

  /// Gathers rows of a segment in the buffer's order: straight into the buffer where they are consecutive there;
  /// otherwise into a tensor of bytes, which is returned.
  at::Tensor gather(size_t s) const {
    const Segment& segment = call_.segments()[s];
    const WireBlock& first = call_.sent_blocks()[s];
    const int64_t num_rows = segment.send.num_wire_rows();
    const bool in_place = is_one_matrix(first.row_bytes);
    const at::Tensor bytes =
        in_place ? call_.wire()
                 : at::empty({round_up(num_rows * first.row_bytes, kMaxWordBytes)}, call_.wire().options());
    segment.send.for_each_slot(segment.slots, first.peer, [&](const Slot& slot, int64_t byte) {
      if (num_rows == 0 || slot.input_row_bytes == 0) return;
      const int64_t word = input_word_of(slot);
      at::Tensor columns = columns_of(bytes, byte, num_rows, first.row_bytes, slot.input_row_bytes, word);
      at::index_select_out(columns, input_rows(slot, word), 0, segment.send.gather_index());
    });
    return in_place ? at::Tensor() : bytes;
  }

  /// Gathered rows of segments -> buffer, block by block.
  void interleave(const std::vector<at::Tensor>& gathered) const {
    int64_t word = widest_word_;
    for (const WireBlock& block : call_.sent_blocks()) word = std::gcd(word, block.row_bytes);
    const at::ScalarType dtype = dtype_of_word(word);
    std::vector<int64_t> next_byte(gathered.size(), 0);
    std::vector<at::Tensor> pieces;
    for (const WireBlock& block : call_.sent_blocks()) {
      if (!gathered[block.segment].defined() || block.num_rows == 0) continue;
      const int64_t num_bytes = block.num_rows * block.row_bytes;
      const at::Tensor rows = gathered[block.segment].view(dtype);
      pieces.push_back(rows.narrow(0, next_byte[block.segment] / word, num_bytes / word));
      next_byte[block.segment] += num_bytes;
      if (const int64_t padding = round_up(num_bytes, kMaxWordBytes) - num_bytes; padding > 0) {
        pieces.push_back(at::empty({padding / word}, rows.options()));
      }
    }
    if (pieces.empty()) return;
    at::Tensor sent = call_.wire().view(dtype).narrow(0, 0, (call_.wire().numel() - call_.received().numel()) / word);
    at::cat_out(sent, pieces);
  }

  void pack_shared(size_t s) const {
    const Segment& segment = call_.segments()[s];
    for (const WireBlock& block : blocks_of(s, call_.sent_blocks())) {
      segment.send.for_each_slot(segment.slots, block.peer, [&](const Slot& slot, int64_t byte) {
        const int64_t word = input_word_of(slot);
        const at::Tensor from = input_rows(slot, word);
        int64_t to_byte = block.first_byte + byte;
        segment.send.for_each_column_run(slot, block.peer, [&](ColumnRun run) {
          columns_of(call_.wire(), to_byte, block.num_rows, block.row_bytes, run.num_bytes, word)
              .copy_(from.narrow(1, run.first_byte / word, run.num_bytes / word));
          to_byte += run.num_bytes;
        });
      });
    }
  }

  void unpack_whole(size_t s) const {
    Segment& segment = call_.segments()[s];
    const WireBlock& first = call_.received_blocks()[s];
    const int64_t num_rows = segment.recv.num_wire_rows(), row_bytes = first.row_bytes;
    at::Tensor bytes = call_.wire();
    int64_t first_byte = first.first_byte;
    if (!is_one_matrix(row_bytes) && num_rows > 0) {
      const int64_t word = std::gcd(widest_word_, row_bytes);
      std::vector<at::Tensor> pieces;
      for (const WireBlock& block : blocks_of(s, call_.received_blocks())) {
        pieces.push_back(call_.wire()
                             .view(dtype_of_word(word))
                             .narrow(0, block.first_byte / word, block.num_rows * row_bytes / word));
      }
      bytes = at::cat(pieces).view(at::kByte);
      first_byte = 0;
    }
    const at::Tensor scatter = segment.recv.scatter_index();
    segment.recv.for_each_slot(segment.slots, first.peer, [&](Slot& slot, int64_t byte) {
      if (slot.output.numel() == 0) return;
      const int64_t word = word_of(slot);
      const at::Tensor columns = columns_of(bytes, first_byte + byte, num_rows, row_bytes, slot.output_row_bytes, word);
      if (segment.recv.has_duplicates()) {
        std::vector<int64_t> shape = slot.output.sizes().vec();
        shape[0] = num_rows;
        slot.output.copy_(sum_rows(columns.contiguous().view(slot.output.scalar_type()).view(shape), scatter));
      } else {
        at::Tensor out = rows_as_words(slot.output, slot.output_row_bytes, slot.output_row_bytes, word);
        at::index_select_out(out, columns, 0, scatter.flatten());
      }
    });
  }

  void unpack_shared(size_t s) const {
    Segment& segment = call_.segments()[s];
    for (const WireBlock& block : blocks_of(s, call_.received_blocks())) {
      segment.recv.for_each_slot(segment.slots, block.peer, [&](Slot& slot, int64_t byte) {
        const int64_t word = word_of(slot);
        const at::Tensor columns = columns_of(call_.wire(), block.first_byte + byte, block.num_rows, block.row_bytes,
                                              segment.recv.wire_bytes(slot, block.peer), word);
        if (segment.sums(slot)) {
          add_block(segment.recv, slot, block.peer, columns);
          return;
        }
        const at::Tensor out = rows_as_words(slot.output, slot.output_row_bytes, slot.output_row_bytes, word);
        int64_t first = 0;
        segment.recv.for_each_column_run(slot, block.peer, [&](ColumnRun run) {
          const int64_t run_words = run.num_bytes / word;
          out.narrow(1, run.first_byte / word, run_words).copy_(columns.narrow(1, first, run_words));
          first += run_words;
        });
      });
    }
  }

  ExchangeCall& call_;
  int64_t widest_word_;
};

}  // namespace

std::unique_ptr<Engine> make_device_engine(ExchangeCall& call) { return std::make_unique<DeviceEngine>(call); }

}  // namespace knapformer
