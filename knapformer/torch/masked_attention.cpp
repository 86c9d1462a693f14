#include "knapformer/torch/masked_attention.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <tuple>

#include "knapformer/core/util/error.h"

namespace knapformer {
namespace {

using torch::autograd::AutogradContext;

/// Queries that see moving ranges are computed so many at a time: at most half as many keys more than they see.
constexpr int64_t kMovingQueries = 256;

MaskRun run_from(const int64_t* row, int64_t num_columns) {
  MaskRun run{.num_queries = row[0], .keys = {}};
  for (const int64_t* r = row + 1; r < row + num_columns; r += 4) {
    if (r[1] > r[0]) run.keys.push_back({.first = r[0], .end = r[1], .first_moves = r[2] != 0, .end_moves = r[3] != 0});
  }
  return run;
}

/// Consecutive queries with keys of which all of them see all, or some, as `mask` says.
struct Tile {
  int64_t first_query = 0, num_queries = 0;
  std::vector<KeyRange> keys;  // none moves
  at::Tensor mask = {};        // (queries, keys), added to scores; undefined: all of them see all

  at::Tensor queries_of(const at::Tensor& tensor) const {
    return tensor.narrow(0, first_query, num_queries).transpose(0, 1).unsqueeze(0);
  }
  at::Tensor keys_of(const at::Tensor& tensor) const {
    std::vector<at::Tensor> parts;
    for (const KeyRange& range : keys) parts.push_back(tensor.narrow(0, range.first, range.end - range.first));
    return (parts.size() == 1 ? parts[0] : at::cat(parts)).transpose(0, 1).unsqueeze(0);
  }
  void add_keys_to(const at::Tensor& sum, const at::Tensor& gradient) const {
    const at::Tensor rows = gradient.squeeze(0).transpose(0, 1);
    int64_t next = 0;
    for (const KeyRange& range : keys) {
      const int64_t count = range.end - range.first;
      sum.narrow(0, range.first, count).add_(rows.narrow(0, next, count));
      next += count;
    }
  }
  std::optional<at::Tensor> score_mask() const { return mask.defined() ? std::optional(mask) : std::nullopt; }
};

/// What some of these queries see and others do not: 0 where a query sees a key, else -inf.
at::Tensor mask_of(const MaskRun& run, const std::vector<KeyRange>& keys, at::ScalarType dtype) {
  std::vector<at::Tensor> parts;
  for (const KeyRange& range : keys) parts.push_back(at::arange(range.first, range.end));
  const at::Tensor key = at::cat(parts).unsqueeze(0), query = at::arange(run.num_queries).unsqueeze(1);
  at::Tensor seen;
  for (const KeyRange& range : run.keys) {
    const at::Tensor of_range = (key >= query * int64_t{range.first_moves} + range.first)
                                    .logical_and_(key < query * int64_t{range.end_moves} + range.end);
    seen = seen.defined() ? seen.logical_or_(of_range) : of_range;
  }
  return at::zeros(seen.sizes(), dtype).masked_fill_(seen.logical_not_(), -std::numeric_limits<double>::infinity());
}

/// Visits tiles that hold each pair once: visit(tile, whether an earlier tile has some of its queries).
void for_each_tile(const at::Tensor& runs, at::ScalarType dtype, const std::function<void(const Tile&, bool)>& visit) {
  int64_t first_query = 0;
  for (int64_t r = 0; r < runs.size(0); ++r) {
    const MaskRun run = run_from(runs.const_data_ptr<int64_t>() + r * runs.size(1), runs.size(1));
    const bool moves =
        std::ranges::any_of(run.keys, [](const KeyRange& range) { return range.first_moves || range.end_moves; });
    for (int64_t from = 0; from < run.num_queries && !run.keys.empty();) {
      const int64_t count = moves ? std::min(kMovingQueries, run.num_queries - from) : run.num_queries;
      const MaskRun part = run.part(from, count);
      Tile all{.first_query = first_query + from, .num_queries = count, .keys = {}};
      Tile some = all;
      for (const KeyRange& range : part.keys) {
        const KeyRange hull{.first = range.first, .end = range.end + (range.end_moves ? count - 1 : 0)};
        KeyRange inner{.first = range.first + (range.first_moves ? count - 1 : 0), .end = range.end};
        // One key that all see stays with those that some see: then no query sees none of these.
        if (range.first_moves || range.end_moves) --inner.end;
        if (inner.end > inner.first) all.keys.push_back(inner);
        const bool has_inner = inner.end > inner.first;
        if (has_inner && hull.first < inner.first) some.keys.push_back({.first = hull.first, .end = inner.first});
        if (has_inner && inner.end < hull.end) some.keys.push_back({.first = inner.end, .end = hull.end});
        if (!has_inner) some.keys.push_back(hull);
      }
      if (!all.keys.empty()) visit(all, false);
      if (!some.keys.empty()) {
        some.mask = mask_of(part, some.keys, dtype);
        visit(some, !all.keys.empty());
      }
      from += count;
    }
    first_query += run.num_queries;
  }
}

at::Tensor for_each_head(const at::Tensor& keys, int64_t num_heads) {
  return keys.size(1) == num_heads ? keys : keys.repeat_interleave(num_heads / keys.size(1), 1);
}

at::Tensor of_kv_heads(const at::Tensor& gradient, const at::Tensor& like) {
  const bool is_grouped = gradient.size(1) != like.size(1);
  const at::Tensor summed = is_grouped ? gradient.unflatten(1, {like.size(1), -1}).sum(2) : gradient;
  return summed.narrow(2, 0, like.size(2)).to(like.scalar_type());
}

double scale_of(const at::Tensor& q) { return 1 / std::sqrt(static_cast<double>(q.size(2))); }

/// Torch's kernel wants values as wide as keys: zeros are added to the narrower ones.
at::Tensor padded(const at::Tensor& tensor, int64_t width) {
  return tensor.size(2) == width ? tensor : at::constant_pad_nd(tensor, {0, width - tensor.size(2)});
}

at::ScalarType wide(at::ScalarType dtype) { return c10::promoteTypes(dtype, at::kFloat); }

/// The output, and the log-sum-exp (queries, heads) of scores.
std::tuple<at::Tensor, at::Tensor> forward_cpu(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                               const at::Tensor& runs) {
  const int64_t width = std::max(q.size(2), v.size(2));
  const at::Tensor queries = padded(q, width);
  const at::Tensor keys = for_each_head(padded(k, width), q.size(1)),
                   values = for_each_head(padded(v, width), q.size(1));
  at::Tensor o = at::zeros({q.size(0), q.size(1), width}, q.options());
  at::Tensor log_sum_exp = at::zeros({q.size(0), q.size(1)}, q.options().dtype(wide(q.scalar_type())));
  at::Tensor before;  // of the queries of the tile before, in the wider type
  const auto attend = [&](const Tile& tile, bool merges) {
    auto [own, own_sum] = at::_scaled_dot_product_flash_attention_for_cpu(
        tile.queries_of(queries), tile.keys_of(keys), tile.keys_of(values), 0.0, false, tile.score_mask(), scale_of(q));
    own = own.squeeze(0).transpose(0, 1);
    own_sum = own_sum.squeeze(0).transpose(0, 1).to(log_sum_exp.scalar_type());
    const at::Tensor sum = log_sum_exp.narrow(0, tile.first_query, tile.num_queries);
    if (merges) {
      const at::Tensor both = at::logaddexp(sum, own_sum);
      own = before * (sum - both).exp_().unsqueeze(-1) + own * (own_sum - both).exp_().unsqueeze(-1);
      own_sum = both;
    }
    before = own.to(log_sum_exp.scalar_type());
    o.narrow(0, tile.first_query, tile.num_queries).copy_(own);
    sum.copy_(own_sum);
  };
  if (q.size(1) > 0) for_each_tile(runs, q.scalar_type(), attend);
  return {o.narrow(2, 0, v.size(2)).contiguous(), log_sum_exp};
}

/// Each tile gives the gradients of its own keys from the whole output, as if that had been computed at once.
std::tuple<at::Tensor, at::Tensor, at::Tensor> backward_cpu(const at::Tensor& grad, const at::Tensor& q,
                                                            const at::Tensor& k, const at::Tensor& v,
                                                            const at::Tensor& o, const at::Tensor& log_sum_exp,
                                                            const at::Tensor& runs) {
  const int64_t width = std::max(q.size(2), v.size(2));
  const at::Tensor queries = padded(q, width), of_o = padded(grad, width), whole_o = padded(o, width);
  const at::Tensor keys = for_each_head(padded(k, width), q.size(1)),
                   values = for_each_head(padded(v, width), q.size(1));
  const at::TensorOptions sums = q.options().dtype(wide(q.scalar_type()));
  at::Tensor of_q = at::zeros(queries.sizes(), sums), of_k = at::zeros(keys.sizes(), sums),
             of_v = at::zeros(values.sizes(), sums);
  if (q.size(1) > 0) {
    for_each_tile(runs, q.scalar_type(), [&](const Tile& tile, bool) {
      const auto [q_part, k_part, v_part] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
          tile.queries_of(of_o), tile.queries_of(queries), tile.keys_of(keys), tile.keys_of(values),
          tile.queries_of(whole_o), tile.queries_of(log_sum_exp.unsqueeze(-1)).squeeze(-1), 0.0, false,
          tile.score_mask(), scale_of(q));
      of_q.narrow(0, tile.first_query, tile.num_queries).add_(q_part.squeeze(0).transpose(0, 1));
      tile.add_keys_to(of_k, k_part);
      tile.add_keys_to(of_v, v_part);
    });
  }
  return {of_q.narrow(2, 0, q.size(2)).to(q.scalar_type()), of_kv_heads(of_k, k), of_kv_heads(of_v, v)};
}

std::tuple<at::Tensor, at::Tensor> forward_meta(const at::Tensor& q, const at::Tensor&, const at::Tensor& v,
                                                const at::Tensor&) {
  return {at::empty_symint({q.sym_size(0), q.sym_size(1), v.sym_size(2)}, q.options()),
          at::empty_symint({q.sym_size(0), q.sym_size(1)}, q.options().dtype(wide(q.scalar_type())))};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward_meta(const at::Tensor&, const at::Tensor& q,
                                                             const at::Tensor& k, const at::Tensor& v,
                                                             const at::Tensor&, const at::Tensor&, const at::Tensor&) {
  const auto like = [](const at::Tensor& tensor) { return at::empty_symint(tensor.sym_sizes(), tensor.options()); };
  return {like(q), like(k), like(v)};
}

class MaskedAttentionFunction : public torch::autograd::Function<MaskedAttentionFunction> {
 public:
  static std::vector<at::Tensor> forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& k,
                                         const at::Tensor& v, const at::Tensor& runs) {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("knapformer::masked_attention", "")
                               .typed<decltype(forward_cpu)>();
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [o, log_sum_exp] = op.call(q, k, v, runs);
    context->save_for_backward({q, k, v, o, log_sum_exp, runs});
    context->mark_non_differentiable({log_sum_exp});
    return {o, log_sum_exp};
  }

  static std::vector<at::Tensor> backward(AutogradContext* context, const std::vector<at::Tensor>& gradients) {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("knapformer::masked_attention_backward", "")
                               .typed<decltype(backward_cpu)>();
    const auto saved = context->get_saved_variables();
    auto [q, k, v] = op.call(gradients[0], saved[0], saved[1], saved[2], saved[3], saved[4], saved[5]);
    return {q, k, v, at::Tensor()};
  }
};

std::tuple<at::Tensor, at::Tensor> with_gradients(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                  const at::Tensor& runs) {
  const std::vector<at::Tensor> outputs = MaskedAttentionFunction::apply(q, k, v, runs);
  return {outputs[0], outputs[1]};
}

}  // namespace

// A fragment, as exchange.cpp defines the library.
TORCH_LIBRARY_FRAGMENT(knapformer, library) {
  library.def("masked_attention(Tensor q, Tensor k, Tensor v, Tensor runs) -> (Tensor, Tensor)");
  library.impl("masked_attention", c10::DispatchKey::CPU, &forward_cpu);
  library.impl("masked_attention", c10::DispatchKey::Meta, &forward_meta);
  library.impl("masked_attention", c10::DispatchKey::AutogradCPU, &with_gradients);
  library.def(
      "masked_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor o, Tensor log_sum_exp, Tensor runs) "
      "-> (Tensor, Tensor, Tensor)");
  library.impl("masked_attention_backward", c10::DispatchKey::CPU, &backward_cpu);
  library.impl("masked_attention_backward", c10::DispatchKey::Meta, &backward_meta);
}

at::Tensor masked_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& runs) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("knapformer::masked_attention", "").typed<decltype(forward_cpu)>();
  return std::get<0>(op.call(q, k, v, runs));
}

MaskTables::MaskTables(MaskRows rows) : rows_(std::move(rows)) {
  const auto num_ranges = static_cast<int64_t>(rows_.max_ranges());
  runs_ = at::zeros({std::ssize(rows_.runs), 1 + 4 * num_ranges}, at::kLong);
  int64_t* out = runs_.mutable_data_ptr<int64_t>();
  for (const MaskRun& run : rows_.runs) {
    int64_t* next = out;
    *next++ = run.num_queries;
    for (const KeyRange& range : run.keys) {
      *next++ = range.first;
      *next++ = range.end;
      *next++ = range.first_moves ? 1 : 0;
      *next++ = range.end_moves ? 1 : 0;
    }
    out += runs_.size(1);
  }
}

void MaskTables::make_blocks(bool pinned) {
  if (blocks_.defined()) return;
  const MaskBlocks blocks = MaskBlocks::of(rows_, kBlockSize);
  std::vector<int32_t> all;
  for (size_t range = 0; range < rows_.max_ranges(); ++range) {
    for (const bool is_end : {false, true}) {
      for (const MaskRun& run : rows_.runs) {
        const KeyRange keys = range < run.keys.size() ? run.keys[range] : KeyRange();
        const int64_t first = is_end ? keys.end : keys.first;
        const int64_t step = (is_end ? keys.end_moves : keys.first_moves) ? 1 : 0;
        for (int64_t i = 0; i < run.num_queries; ++i) all.push_back(static_cast<int32_t>(first + i * step));
      }
    }
  }
  for (const BlockLists* lists : {&blocks.some_keys, &blocks.all_keys, &blocks.some_queries, &blocks.all_queries}) {
    all.insert(all.end(), lists->counts.begin(), lists->counts.end());
    all.insert(all.end(), lists->indices.begin(), lists->indices.end());
  }
  blocks_ = at::empty({std::ssize(all)}, at::TensorOptions(at::kInt).pinned_memory(pinned));
  std::ranges::copy(all, blocks_.mutable_data_ptr<int32_t>());
}

const MaskTables::Blocks& MaskTables::blocks_on(at::Device device) {
  for (const auto& [on, known] : copies_) {
    if (on == device) return known;
  }
  make_blocks(/*pinned=*/!device.is_cpu());
  const at::Tensor copied = blocks_.to(device, /*non_blocking=*/true);
  int64_t next = 0;
  const auto take = [&](int64_t size) {
    const at::Tensor part = copied.narrow(0, next, size);
    next += size;
    return part;
  };
  const auto blocks_of = [](int64_t num_rows) { return (num_rows + kBlockSize - 1) / kBlockSize; };
  const int64_t num_queries = blocks_of(rows_.num_queries), num_keys = blocks_of(rows_.num_keys);
  Blocks blocks;
  for (size_t range = 0; range < rows_.max_ranges(); ++range) {
    const at::Tensor first = take(rows_.num_queries);
    blocks.bounds.emplace_back(first, take(rows_.num_queries));
  }
  for (const auto& [own, others] : {std::pair(num_queries, num_keys), std::pair(num_keys, num_queries)}) {
    for (int i = 0; i < 2; ++i) {
      blocks.lists.push_back(take(own).view({1, 1, own}));
      blocks.lists.push_back(take(own * others).view({1, 1, own, others}));
    }
  }
  return copies_.emplace_back(device, std::move(blocks)).second;
}

}  // namespace knapformer
