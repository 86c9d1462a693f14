// The engine for any device. The rows of each segment are gathered into a matrix of bytes in wire order, and what
// arrives is gathered out of such a matrix.
//
// One buffer holds both wires. This rank's own rows are last on the sending one and first on the receiving one, so they
// need no copy between the two:
//
//   | sent to others, by peer | own | received from others, by peer |
//   `------- sending wire ----------'
//                             `------- receiving wire --------------'
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
    word_bytes_ = divisor == 0 ? 1 : divisor;
    word_ = word_of(word_bytes_);
  }

  WireBuffers pack() override {
    const int64_t sent = call_.total_sent_bytes(), received = call_.total_received_bytes();
    int64_t own = 0;
    for (const Segment& segment : call_.segments()) {
      own += segment.send.peer_rows(call_.this_peer()) * segment.sent_row_bytes(call_.this_peer());
    }
    wires_ =
        at::empty({(sent + own + received) / word_bytes_}, call_.segments()[0].slots[0].input.options().dtype(word_));
    own_words_ = own / word_bytes_;
    sent_words_ = sent / word_bytes_;
    pack_into(wires_.narrow(0, 0, sent_words_ + own_words_));
    const at::Tensor bytes = wires_.view(at::kByte);
    return {.send = bytes.narrow(0, 0, sent), .recv = bytes.narrow(0, sent + own, received)};
  }

  void move_own() override {}

  void unpack() override {
    call_.allocate_outputs();
    const at::Tensor wire = wires_.narrow(0, sent_words_, wires_.size(0) - sent_words_);
    for (size_t r = 0; r < call_.segments().size(); ++r) {
      Segment& segment = call_.segments()[r];
      if (segment.recv.heads_shared()) {
        unpack_shared(segment, wire, r);
      } else {
        unpack_whole(segment, wire, r);
      }
    }
  }

 private:
  struct Block {
    int64_t first_word = 0;
    int64_t num_rows = 0;
    int64_t row_words = 0;
  };

  /// The blocks of a segment on a wire, and where on it they begin. Order: as in the picture above.
  std::vector<std::pair<int32_t, Block>> blocks(size_t wanted, bool sending) const {
    std::vector<std::pair<int32_t, Block>> found;
    int64_t first_word = 0;
    const auto visit = [&](int32_t peer) {
      for (size_t r = 0; r < call_.segments().size(); ++r) {
        const Segment& segment = call_.segments()[r];
        const SegmentEnd& end = sending ? segment.send : segment.recv;
        const int64_t row_bytes = sending ? segment.sent_row_bytes(peer) : segment.received_row_bytes(peer);
        const Block block{
            .first_word = first_word, .num_rows = end.peer_rows(peer), .row_words = row_bytes / word_bytes_};
        if (r == wanted && block.num_rows > 0) found.emplace_back(peer, block);
        first_word += block.num_rows * block.row_words;
      }
    };
    if (!sending) visit(call_.this_peer());
    for (int32_t peer = 0; peer < call_.num_peers(); ++peer) {
      if (peer != call_.this_peer()) visit(peer);
    }
    if (sending) visit(call_.this_peer());
    return found;
  }

  /// (rows, words) of a dense tensor's rows.
  at::Tensor rows_as_words(const at::Tensor& tensor, int64_t row_bytes, int64_t stride_bytes) const {
    const int64_t num_rows = tensor.size(0), item_bytes = static_cast<int64_t>(tensor.itemsize());
    const at::Tensor flat = tensor.as_strided({num_rows, row_bytes / item_bytes}, {stride_bytes / item_bytes, 1});
    return flat.view(word_);
  }

  static at::Tensor matrix(const at::Tensor& wire, const Block& block) {
    return wire.narrow(0, block.first_word, block.num_rows * block.row_words).view({block.num_rows, block.row_words});
  }

  void pack_into(const at::Tensor& wire) {
    const bool alone = call_.segments().size() == 1;
    std::vector<at::Tensor> matrices(call_.segments().size());
    for (size_t r = 0; r < call_.segments().size(); ++r) {
      const Segment& segment = call_.segments()[r];
      if (segment.send.heads_shared()) {
        pack_shared(segment, wire, r);
        continue;
      }
      const int64_t row_words = segment.sent_row_bytes(call_.this_peer()) / word_bytes_,
                    num_rows = segment.send.num_wire_rows();
      // A segment alone is the wire; of several each is gathered on its own, then cut into blocks.
      matrices[r] = alone ? wire.view({num_rows, row_words}) : at::empty({num_rows, row_words}, wire.options());
      if (matrices[r].numel() == 0) continue;
      const at::Tensor gather = segment.send.gather_index();
      int64_t column = 0;
      for (const Slot& slot : segment.slots) {
        const int64_t words = slot.input_row_bytes / word_bytes_;
        if (words == 0) continue;
        at::Tensor columns = matrices[r].narrow(1, column, words);
        at::index_select_out(columns, rows_as_words(slot.input, slot.input_row_bytes, slot.input_stride_bytes), 0,
                             gather);
        column += words;
      }
    }
    if (!alone) interleave(matrices, wire);
  }

  /// Matrices of segments -> wire, block by block.
  void interleave(const std::vector<at::Tensor>& matrices, const at::Tensor& wire) const {
    std::vector<std::pair<int64_t, at::Tensor>> pieces;
    for (size_t r = 0; r < matrices.size(); ++r) {
      if (!matrices[r].defined()) continue;
      int64_t row = 0;
      for (const auto& [peer, block] : blocks(r, /*sending=*/true)) {
        pieces.emplace_back(block.first_word, matrices[r].narrow(0, row, block.num_rows).flatten());
        row += block.num_rows;
      }
    }
    if (pieces.empty()) return;
    std::sort(pieces.begin(), pieces.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    std::vector<at::Tensor> ordered;
    for (auto& piece : pieces) ordered.push_back(std::move(piece.second));
    at::Tensor out = wire;
    at::cat_out(out, ordered);
  }

  void pack_shared(const Segment& segment, const at::Tensor& wire, size_t r) {
    for (const auto& [peer, block] : blocks(r, /*sending=*/true)) {
      const at::Tensor to = matrix(wire, block);
      int64_t column = 0;
      for (const Slot& slot : segment.slots) {
        const at::Tensor from = rows_as_words(slot.input, slot.input_row_bytes, slot.input_stride_bytes);
        segment.send.for_each_column_run(slot, peer, slot.input_row_bytes, [&](ColumnRun run) {
          const int64_t words = run.num_bytes / word_bytes_;
          to.narrow(1, column, words).copy_(from.narrow(1, run.first_byte / word_bytes_, words));
          column += words;
        });
      }
    }
  }

  void unpack_whole(const Segment& segment, const at::Tensor& wire, size_t r) {
    const int64_t num_rows = segment.recv.num_wire_rows();
    const int64_t row_words = segment.received_row_bytes(call_.this_peer()) / word_bytes_;
    at::Tensor arrived;
    if (call_.segments().size() == 1) {
      arrived = wire.view({num_rows, row_words});
    } else {
      std::vector<at::Tensor> pieces;
      for (const auto& [peer, block] : blocks(r, /*sending=*/false)) pieces.push_back(matrix(wire, block));
      arrived = pieces.empty() ? at::empty({0, row_words}, wire.options()) : at::cat(pieces);
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

  void unpack_shared(const Segment& segment, const at::Tensor& wire, size_t r) {
    std::vector<at::Tensor> sums(segment.slots.size());
    for (size_t i = 0; i < segment.slots.size(); ++i) {
      if (segment.sums(segment.slots[i])) sums[i] = zeros_to_sum(segment.slots[i].output);
    }
    for (const auto& [peer, block] : blocks(r, /*sending=*/false)) {
      const at::Tensor from = matrix(wire, block);
      int64_t column = 0;
      for (size_t i = 0; i < segment.slots.size(); ++i) {
        const Slot& slot = segment.slots[i];
        const int64_t words = segment.recv.wire_bytes(slot, peer, slot.output_row_bytes) / word_bytes_;
        const at::Tensor columns = from.narrow(1, column, words);
        column += words;
        if (words == 0) continue;
        if (sums[i].defined()) {
          add_block(sums[i], segment, slot, peer, columns);
          continue;
        }
        const at::Tensor out = rows_as_words(slot.output, slot.output_row_bytes, slot.output_row_bytes);
        int64_t first = 0;
        segment.recv.for_each_column_run(slot, peer, slot.output_row_bytes, [&](ColumnRun run) {
          const int64_t run_words = run.num_bytes / word_bytes_;
          out.narrow(1, run.first_byte / word_bytes_, run_words).copy_(columns.narrow(1, first, run_words));
          first += run_words;
        });
      }
    }
    for (size_t i = 0; i < segment.slots.size(); ++i) {
      if (sums[i].defined()) segment.slots[i].output.copy_(sums[i]);
    }
  }

  ExchangeCall& call_;
  at::ScalarType word_ = at::kByte;
  int64_t word_bytes_ = 1;
  at::Tensor wires_;
  int64_t sent_words_ = 0, own_words_ = 0;
};

}  // namespace

std::unique_ptr<Engine> make_device_engine(ExchangeCall& call) { return std::make_unique<DeviceEngine>(call); }

}  // namespace knapformer
