// The engine for any device. Rows are gathered into one matrix of bytes a region, in wire order, and gathered out of
// one.
//
// One buffer holds both wires, so that this rank's own rows, last on the one and first on the other, need no copy
// between:
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

#include "knapformer/core/error.h"
#include "knapformer/torch/engine.h"
#include "knapformer/torch/repeats.h"

namespace knapformer {
namespace {

at::ScalarType word_of(int64_t divisor) {
  if (divisor % 8 == 0) return at::kLong;
  if (divisor % 4 == 0) return at::kInt;
  if (divisor % 2 == 0) return at::kShort;
  return at::kByte;
}

class IndexEngine final : public Engine {
 public:
  explicit IndexEngine(ExchangeCall& call) : call_(call) {
    int64_t divisor = 8;
    for (const ExchangeRegion& region : call.regions()) {
      for (const ExchangePart& part : region.parts) {
        const int64_t unit = part.shares == nullptr ? part.input_row_bytes : part.head_bytes;
        divisor = std::gcd(divisor, unit);
        // An input is read in words too, from where it begins and a row's stride at a time.
        divisor =
            std::gcd(divisor, std::gcd(part.input_stride_bytes, part.input.storage_offset() * part.input.itemsize()));
      }
    }
    word_bytes_ = divisor == 0 ? 1 : divisor;
    word_ = word_of(word_bytes_);
  }

  WireBuffers pack() override {
    const int64_t sent = call_.total_sent_bytes(), received = call_.total_received_bytes();
    int64_t own = 0;
    for (const ExchangeRegion& region : call_.regions()) {
      own += region.send.peer_rows(call_.this_peer()) * region.sent_row_bytes(call_.this_peer());
    }
    wires_ =
        at::empty({(sent + own + received) / word_bytes_}, call_.regions()[0].parts[0].input.options().dtype(word_));
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
    for (size_t r = 0; r < call_.regions().size(); ++r) {
      ExchangeRegion& region = call_.regions()[r];
      if (region.recv.heads_shared()) {
        unpack_shared(region, wire, r);
      } else {
        unpack_whole(region, wire, r);
      }
    }
  }

 private:
  struct Block {
    int64_t first_word = 0;
    int64_t num_rows = 0;
    int64_t row_words = 0;
  };

  /// The blocks of a region on a wire, and where on it they begin. Order: as in the picture above.
  std::vector<std::pair<int32_t, Block>> blocks(size_t wanted, bool sending) const {
    std::vector<std::pair<int32_t, Block>> found;
    int64_t first_word = 0;
    const auto visit = [&](int32_t peer) {
      for (size_t r = 0; r < call_.regions().size(); ++r) {
        const ExchangeRegion& region = call_.regions()[r];
        const EndView& end = sending ? region.send : region.recv;
        const int64_t row_bytes = sending ? region.sent_row_bytes(peer) : region.received_row_bytes(peer);
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
    const bool alone = call_.regions().size() == 1;
    std::vector<at::Tensor> matrices(call_.regions().size());
    for (size_t r = 0; r < call_.regions().size(); ++r) {
      const ExchangeRegion& region = call_.regions()[r];
      if (region.send.heads_shared()) {
        pack_shared(region, wire, r);
        continue;
      }
      const int64_t row_words = region.sent_row_bytes(call_.this_peer()) / word_bytes_,
                    num_rows = region.send.num_wire_rows();
      // A region alone is the wire; of several each is gathered on its own, then cut into blocks.
      matrices[r] = alone ? wire.view({num_rows, row_words}) : at::empty({num_rows, row_words}, wire.options());
      if (matrices[r].numel() == 0) continue;
      const at::Tensor take = region.send.take(region.send_index);
      int64_t column = 0;
      for (const ExchangePart& part : region.parts) {
        const int64_t words = part.input_row_bytes / word_bytes_;
        if (words == 0) continue;
        at::Tensor columns = matrices[r].narrow(1, column, words);
        at::index_select_out(columns, rows_as_words(part.input, part.input_row_bytes, part.input_stride_bytes), 0,
                             take);
        column += words;
      }
    }
    if (!alone) interleave(matrices, wire);
  }

  /// Matrices of regions -> wire, block by block.
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

  void pack_shared(const ExchangeRegion& region, const at::Tensor& wire, size_t r) {
    for (const auto& [peer, block] : blocks(r, /*sending=*/true)) {
      const at::Tensor to = matrix(wire, block);
      int64_t column = 0;
      for (const ExchangePart& part : region.parts) {
        const at::Tensor from = rows_as_words(part.input, part.input_row_bytes, part.input_stride_bytes);
        part.for_each_column_run(region.send, peer, part.input_row_bytes, [&](ColumnRun run) {
          const int64_t words = run.num_bytes / word_bytes_;
          to.narrow(1, column, words).copy_(from.narrow(1, run.first_byte / word_bytes_, words));
          column += words;
        });
      }
    }
  }

  void unpack_whole(const ExchangeRegion& region, const at::Tensor& wire, size_t r) {
    const int64_t num_rows = region.recv.num_wire_rows();
    const int64_t row_words = region.received_row_bytes(call_.this_peer()) / word_bytes_;
    at::Tensor arrived;
    if (call_.regions().size() == 1) {
      arrived = wire.view({num_rows, row_words});
    } else {
      std::vector<at::Tensor> pieces;
      for (const auto& [peer, block] : blocks(r, /*sending=*/false)) pieces.push_back(matrix(wire, block));
      arrived = pieces.empty() ? at::empty({0, row_words}, wire.options()) : at::cat(pieces);
    }
    const at::Tensor puts = region.recv.put(region.recv_index);
    int64_t column = 0;
    for (const ExchangePart& part : region.parts) {
      const int64_t words = part.output_row_bytes / word_bytes_;
      const at::Tensor columns = arrived.narrow(1, column, words);
      column += words;
      if (part.output.numel() == 0) continue;
      if (region.recv.rows_repeat()) {
        std::vector<int64_t> shape = part.output.sizes().vec();
        shape[0] = num_rows;
        part.output.copy_(sum_rows(columns.contiguous().view(part.output.scalar_type()).view(shape), puts));
      } else {
        at::Tensor out = rows_as_words(part.output, part.output_row_bytes, part.output_row_bytes);
        at::index_select_out(out, columns, 0, puts.flatten());
      }
    }
  }

  void unpack_shared(const ExchangeRegion& region, const at::Tensor& wire, size_t r) {
    std::vector<at::Tensor> sums(region.parts.size());
    for (size_t i = 0; i < region.parts.size(); ++i) {
      if (region.sums(region.parts[i])) sums[i] = zeros_to_sum(region.parts[i].output);
    }
    for (const auto& [peer, block] : blocks(r, /*sending=*/false)) {
      const at::Tensor from = matrix(wire, block);
      int64_t column = 0;
      for (size_t i = 0; i < region.parts.size(); ++i) {
        const ExchangePart& part = region.parts[i];
        const int64_t words = part.wire_bytes(region.recv, peer, part.output_row_bytes) / word_bytes_;
        const at::Tensor columns = from.narrow(1, column, words);
        column += words;
        if (words == 0) continue;
        if (sums[i].defined()) {
          const std::span<const int32_t> heads = part.shares->of(peer - region.recv.head_group().first_peer);
          std::vector<int64_t> shape = part.output.sizes().vec();
          shape[1] = static_cast<int64_t>(heads.size());
          add_heads(sums[i], columns.contiguous().view(part.output.scalar_type()).view(shape), heads);
          continue;
        }
        const at::Tensor out = rows_as_words(part.output, part.output_row_bytes, part.output_row_bytes);
        int64_t first = 0;
        part.for_each_column_run(region.recv, peer, part.output_row_bytes, [&](ColumnRun run) {
          const int64_t run_words = run.num_bytes / word_bytes_;
          out.narrow(1, run.first_byte / word_bytes_, run_words).copy_(columns.narrow(1, first, run_words));
          first += run_words;
        });
      }
    }
    for (size_t i = 0; i < region.parts.size(); ++i) {
      if (sums[i].defined()) region.parts[i].output.copy_(sums[i]);
    }
  }

  ExchangeCall& call_;
  at::ScalarType word_ = at::kByte;
  int64_t word_bytes_ = 1;
  at::Tensor wires_;
  int64_t sent_words_ = 0, own_words_ = 0;
};

}  // namespace

std::unique_ptr<Engine> make_index_engine(ExchangeCall& call) { return std::make_unique<IndexEngine>(call); }

}  // namespace knapformer
