// The engine for any device. The rows of each segment are gathered into a matrix of bytes in the buffer's order, and
// what arrives is gathered out of such a matrix: own rows too, which need no copy between the two.
//
// Bytes are moved as the widest integers that divide every row.
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>

#include <algorithm>
#include <numeric>

#include "knapformer/core/util/error.h"
#include "knapformer/torch/exchange/duplicates.h"
#include "knapformer/torch/exchange/engine.h"

namespace knapformer {
namespace {

at::ScalarType word_of(int64_t divisor) {
  if (divisor % 8 == 0) return at::kLong;
  if (divisor % 4 == 0) return at::kInt;
  if (divisor % 2 == 0) return at::kShort;
  return at::kByte;
}

class DeviceEngine final : public Engine {
 public:
  explicit DeviceEngine(ExchangeCall& call) : call_(call) {
    int64_t divisor = 8;
    for (const Segment& segment : call.segments()) {
      for (const Slot& slot : segment.slots) {
        const int64_t unit = slot.shares == nullptr ? slot.input_row_bytes : slot.head_bytes;
        divisor = std::gcd(divisor, unit);
        // An input is read in words too, from where it begins and a row's stride at a time.
        divisor =
            std::gcd(divisor, std::gcd(slot.input_stride_bytes, slot.input.storage_offset() * slot.input.itemsize()));
      }
    }
    word_bytes_ = divisor;
    wire_ = call.wire().view(word_of(divisor));
  }

  void pack() override {
    std::vector<at::Tensor> matrices(call_.segments().size());
    for (size_t s = 0; s < matrices.size(); ++s) {
      if (call_.segments()[s].send.heads_shared()) {
        pack_shared(s);
      } else {
        matrices[s] = gather(s);
      }
    }
    if (matrices.size() > 1) interleave(matrices);
  }

  void move_own() override {}

  void unpack() override {
    call_.allocate_outputs();
    for (size_t s = 0; s < call_.segments().size(); ++s) {
      if (call_.segments()[s].recv.heads_shared()) {
        unpack_shared(s);
      } else {
        unpack_whole(s);
      }
    }
  }

 private:
  /// (rows, words) of a dense tensor's rows.
  at::Tensor rows_as_words(const at::Tensor& tensor, int64_t row_bytes, int64_t stride_bytes) const {
    const int64_t num_rows = tensor.size(0), item_bytes = static_cast<int64_t>(tensor.itemsize());
    const at::Tensor flat = tensor.as_strided({num_rows, row_bytes / item_bytes}, {stride_bytes / item_bytes, 1});
    return flat.view(wire_.scalar_type());
  }

  /// (rows, words) of the buffer from a block on.
  at::Tensor matrix(const WireBlock& block, int64_t num_rows) const {
    const int64_t row_words = block.row_bytes / word_bytes_;
    return wire_.narrow(0, block.first_byte / word_bytes_, num_rows * row_words).view({num_rows, row_words});
  }
  at::Tensor matrix(const WireBlock& block) const { return matrix(block, block.num_rows); }

  /// The blocks of a segment that have rows.
  static std::vector<WireBlock> blocks_of(size_t segment, const std::vector<WireBlock>& blocks) {
    std::vector<WireBlock> found;
    std::ranges::copy_if(blocks, std::back_inserter(found),
                         [&](const WireBlock& block) { return block.segment == segment && block.num_rows > 0; });
    return found;
  }

  /// The rows of a segment in the buffer's order. A segment alone is in the buffer with that; of several each is
  /// gathered on its own.
  at::Tensor gather(size_t s) const {
    const Segment& segment = call_.segments()[s];
    const WireBlock& first = call_.sent_blocks()[s];
    const int64_t num_rows = segment.send.num_wire_rows();
    const at::Tensor gathered = call_.segments().size() == 1
                                    ? matrix(first, num_rows)
                                    : at::empty({num_rows, first.row_bytes / word_bytes_}, wire_.options());
    if (gathered.numel() == 0) return gathered;
    const at::Tensor index = segment.send.gather_index();
    int64_t column = 0;
    for (const Slot& slot : segment.slots) {
      const int64_t words = slot.input_row_bytes / word_bytes_;
      if (words == 0) continue;
      at::Tensor columns = gathered.narrow(1, column, words);
      at::index_select_out(columns, rows_as_words(slot.input, slot.input_row_bytes, slot.input_stride_bytes), 0, index);
      column += words;
    }
    return gathered;
  }

  /// Matrices of segments -> buffer, block by block.
  void interleave(const std::vector<at::Tensor>& matrices) const {
    std::vector<int64_t> next_row(matrices.size(), 0);
    std::vector<at::Tensor> pieces;
    for (const WireBlock& block : call_.sent_blocks()) {
      if (!matrices[block.segment].defined()) continue;
      pieces.push_back(matrices[block.segment].narrow(0, next_row[block.segment], block.num_rows).flatten());
      next_row[block.segment] += block.num_rows;
    }
    if (pieces.empty()) return;
    at::Tensor sent = wire_.narrow(0, 0, wire_.numel() - call_.received().numel() / word_bytes_);
    at::cat_out(sent, pieces);
  }

  void pack_shared(size_t s) const {
    const Segment& segment = call_.segments()[s];
    for (const WireBlock& block : blocks_of(s, call_.sent_blocks())) {
      const at::Tensor to = matrix(block);
      int64_t column = 0;
      for (const Slot& slot : segment.slots) {
        const at::Tensor from = rows_as_words(slot.input, slot.input_row_bytes, slot.input_stride_bytes);
        segment.send.for_each_column_run(slot, block.peer, [&](ColumnRun run) {
          const int64_t words = run.num_bytes / word_bytes_;
          to.narrow(1, column, words).copy_(from.narrow(1, run.first_byte / word_bytes_, words));
          column += words;
        });
      }
    }
  }

  void unpack_whole(size_t s) const {
    const Segment& segment = call_.segments()[s];
    const WireBlock& first = call_.received_blocks()[s];
    const int64_t num_rows = segment.recv.num_wire_rows();
    at::Tensor arrived;
    if (call_.segments().size() == 1) {
      arrived = matrix(first, num_rows);
    } else {
      std::vector<at::Tensor> pieces = {matrix(first)};  // also where it has no rows: cat needs one
      for (const WireBlock& block : blocks_of(s, call_.received_blocks())) {
        if (block.peer != first.peer) pieces.push_back(matrix(block));
      }
      arrived = at::cat(pieces);
    }
    const at::Tensor scatter = segment.recv.scatter_index();
    int64_t column = 0;
    for (const Slot& slot : segment.slots) {
      const int64_t words = slot.output_row_bytes / word_bytes_;
      const at::Tensor columns = arrived.narrow(1, column, words);
      column += words;
      if (slot.output.numel() == 0) continue;
      if (segment.recv.has_duplicates()) {
        std::vector<int64_t> shape = slot.output.sizes().vec();
        shape[0] = num_rows;
        slot.output.copy_(sum_rows(columns.contiguous().view(slot.output.scalar_type()).view(shape), scatter));
      } else {
        at::Tensor out = rows_as_words(slot.output, slot.output_row_bytes, slot.output_row_bytes);
        at::index_select_out(out, columns, 0, scatter.flatten());
      }
    }
  }

  void unpack_shared(size_t s) const {
    Segment& segment = call_.segments()[s];
    for (const WireBlock& block : blocks_of(s, call_.received_blocks())) {
      const at::Tensor from = matrix(block);
      int64_t column = 0;
      for (Slot& slot : segment.slots) {
        const int64_t words = segment.recv.wire_bytes(slot, block.peer) / word_bytes_;
        const at::Tensor columns = from.narrow(1, column, words);
        column += words;
        if (segment.sums(slot)) {
          add_block(segment.recv, slot, block.peer, columns);
          continue;
        }
        const at::Tensor out = rows_as_words(slot.output, slot.output_row_bytes, slot.output_row_bytes);
        int64_t first = 0;
        segment.recv.for_each_column_run(slot, block.peer, [&](ColumnRun run) {
          const int64_t run_words = run.num_bytes / word_bytes_;
          out.narrow(1, run.first_byte / word_bytes_, run_words).copy_(columns.narrow(1, first, run_words));
          first += run_words;
        });
      }
    }
  }

  ExchangeCall& call_;
  int64_t word_bytes_ = 1;
  at::Tensor wire_;  // the call's buffer, as words
};

}  // namespace

std::unique_ptr<Engine> make_device_engine(ExchangeCall& call) { return std::make_unique<DeviceEngine>(call); }

}  // namespace knapformer
