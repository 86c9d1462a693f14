#include "knapformer/torch/masked_attention.h"

#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/full.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>

namespace knapformer {
namespace {

/// Of queries whose ranges move, at most so many are computed together with the keys that only some of them see.
constexpr int64_t kMovingQueries = 128;

/// What is added to the scores of (queries, keys of the hull): 0 where a query sees a key, else -inf.
at::Tensor mask_of(const MaskRun& run, const std::vector<KeyRange>& hull, at::ScalarType dtype) {
  std::vector<at::Tensor> parts;
  const at::Tensor query = at::arange(run.num_queries).unsqueeze(1);
  for (size_t i = 0; i < hull.size(); ++i) {
    const at::Tensor key = at::arange(hull[i].first, hull[i].end).unsqueeze(0);
    const KeyRange& range = run.keys[i];
    parts.push_back((key < query * int64_t{range.first_moves} + range.first)
                        .logical_or_(key >= query * int64_t{range.end_moves} + range.end));
  }
  const at::Tensor hidden = at::cat(parts, 1);
  return at::zeros(hidden.sizes(), dtype).masked_fill_(hidden, -std::numeric_limits<double>::infinity());
}

/// Torch's kernel wants values as wide as keys: zeros are added to the narrower ones.
at::Tensor padded(const at::Tensor& tensor, int64_t width) {
  return tensor.size(2) == width ? tensor : at::constant_pad_nd(tensor, {0, width - tensor.size(2)});
}

/// Consecutive queries and keys. All queries see all keys, or as score_mask says, which is added to their scores; or,
/// where is_causal, the first query sees the first key, the second one two, and so on.
struct Tile {
  int64_t first_query = 0, num_queries = 0;
  std::vector<KeyRange> keys = {};
  bool is_causal = false;
  std::optional<at::Tensor> score_mask = std::nullopt;

  /// (1, heads, queries, width)
  at::Tensor queries_of(const at::Tensor& rows) const {
    return rows.narrow(0, first_query, num_queries).transpose(0, 1).unsqueeze(0);
  }
  at::Tensor keys_of(const at::Tensor& rows) const {
    std::vector<at::Tensor> parts;
    for (const KeyRange& range : keys) parts.push_back(rows.narrow(0, range.first, range.end - range.first));
    return (parts.size() == 1 ? parts[0] : at::cat(parts)).transpose(0, 1).unsqueeze(0);
  }
  void add_keys_to(const at::Tensor& sums, const at::Tensor& gradient) const {
    int64_t next = 0;
    for (const KeyRange& range : keys) {
      const int64_t count = range.end - range.first;
      sums.narrow(0, range.first, count).add_(gradient[0].narrow(1, next, count).transpose(0, 1));
      next += count;
    }
  }
};

using VisitTile = std::function<void(const Tile&)>;

/// Visits tiles that have each pair of a run once: one of all its queries with the keys that all of them see; then, for
/// the other keys, those of either half of the queries. At most kMovingQueries are one tile, with a mask.
void for_each_tile(const MaskRun& run, int64_t first_query, at::ScalarType dtype, const VisitTile& visit) {
  const int64_t moved = run.num_queries - 1;
  Tile all{.first_query = first_query, .num_queries = run.num_queries}, some = all;
  MaskRun others{.num_queries = run.num_queries, .keys = {}};
  for (const KeyRange& range : run.keys) {
    // One key that all see stays beside an end that moves: so no query sees none of the others.
    const KeyRange seen{.first = range.first + (range.first_moves ? moved + 1 : 0),
                        .end = range.end - (range.end_moves ? 1 : 0)};
    if (seen.first >= seen.end) {
      others.keys.push_back(range);
      continue;
    }
    all.keys.push_back(seen);
    if (range.first_moves) others.keys.push_back({.first = range.first, .end = seen.first, .first_moves = true});
    if (range.end_moves) others.keys.push_back({.first = seen.end, .end = range.end, .end_moves = true});
  }
  if (!all.keys.empty()) visit(all);
  if (others.keys.empty()) return;
  if (run.num_queries > kMovingQueries) {
    const int64_t half = (run.num_queries / kMovingQueries + 1) / 2 * kMovingQueries;
    for_each_tile(others.part(0, half), first_query, dtype, visit);
    for_each_tile(others.part(half, run.num_queries - half), first_query + half, dtype, visit);
    return;
  }
  for (const KeyRange& range : others.keys)
    some.keys.push_back({.first = range.first, .end = range.end + (range.end_moves ? moved : 0)});
  const KeyRange& range = others.keys[0];
  some.is_causal = others.keys.size() == 1 && range.end == range.first + 1 && !range.first_moves && range.end_moves;
  if (!some.is_causal) some.score_mask = mask_of(others, some.keys, dtype);
  visit(some);
}

/// Visits the tiles of all runs.
void for_each_tile(const at::Tensor& q, const MaskTables& tables, const VisitTile& visit) {
  if (q.size(1) == 0) return;
  int64_t first_query = 0;
  for (const MaskRun& run : tables.rows().runs) {
    for_each_tile(run, first_query, q.scalar_type(), visit);
    first_query += run.num_queries;
  }
}

/// MaskTables, as an object that autograd can keep.
struct KeptTables : torch::CustomClassHolder {
  explicit KeptTables(std::shared_ptr<const MaskTables> kept) : tables(std::move(kept)) {}
  std::shared_ptr<const MaskTables> tables;
};

/// Torch's attention of each tile. Keys' gradients are added up in place, and no mask of scores is kept for the
/// backward pass: those of a long sequence would be as large as all its scores.
class AttentionOfTiles : public torch::autograd::Function<AttentionOfTiles> {
 public:
  /// q, k, v: (rows, heads, width) with the same heads and width.
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, std::shared_ptr<const MaskTables> tables, double scale) {
    const at::TensorOptions sums = q.options().dtype(wide(q.scalar_type()));
    at::Tensor o = at::zeros(q.sizes(), sums);
    const at::Tensor log_sum_exp = at::full({1, q.size(1), q.size(0)}, -std::numeric_limits<double>::infinity(), sums);
    for_each_tile(q, *tables, [&](const Tile& tile) {
      const auto [own, own_sum] = at::_scaled_dot_product_flash_attention_for_cpu(
          tile.queries_of(q), tile.keys_of(k), tile.keys_of(v), 0.0, tile.is_causal, tile.score_mask, scale);
      const at::Tensor sum = log_sum_exp.narrow(2, tile.first_query, tile.num_queries);
      tile.queries_of(o).lerp_(own.to(o.scalar_type()), at::sigmoid(own_sum - sum).unsqueeze(-1));
      sum.copy_(at::logaddexp(sum, own_sum));
    });
    o = o.to(q.scalar_type());
    context->save_for_backward({q, k, v, o, log_sum_exp});
    context->saved_data["tables"] = c10::IValue::make_capsule(c10::make_intrusive<KeptTables>(std::move(tables)));
    context->saved_data["scale"] = scale;
    return o;
  }

  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext* context,
                                          const std::vector<at::Tensor>& gradients) {
    const auto saved = context->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2], &o = saved[3], &log_sum_exp = saved[4],
                     of_o = gradients[0].contiguous();
    const auto kept = c10::static_intrusive_pointer_cast<KeptTables>(context->saved_data["tables"].toCapsule());
    const auto sums_for = [&](const at::Tensor& rows) {
      return at::zeros(rows.sizes(), rows.options().dtype(wide(rows.scalar_type())));
    };
    const at::Tensor of_q = sums_for(q), of_k = sums_for(k), of_v = sums_for(v);
    for_each_tile(q, *kept->tables, [&](const Tile& tile) {
      const auto [q_part, k_part, v_part] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
          tile.queries_of(of_o), tile.queries_of(q), tile.keys_of(k), tile.keys_of(v), tile.queries_of(o),
          log_sum_exp.narrow(2, tile.first_query, tile.num_queries), 0.0, tile.is_causal, tile.score_mask,
          context->saved_data["scale"].toDouble());
      tile.queries_of(of_q).add_(q_part);
      tile.add_keys_to(of_k, k_part);
      tile.add_keys_to(of_v, v_part);
    });
    return {of_q.to(q.scalar_type()), of_k.to(k.scalar_type()), of_v.to(v.scalar_type()), at::Tensor(), at::Tensor()};
  }

 private:
  static at::ScalarType wide(at::ScalarType dtype) { return c10::promoteTypes(dtype, at::kFloat); }
};

}  // namespace

at::Tensor masked_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            std::shared_ptr<const MaskTables> tables) {
  const int64_t width = std::max(q.size(2), v.size(2)), num_heads = q.size(1);
  const auto for_each_head = [&](const at::Tensor& tensor) {
    const at::Tensor of_width = padded(tensor, width);
    return tensor.size(1) == num_heads ? of_width : of_width.repeat_interleave(num_heads / tensor.size(1), 1);
  };
  const double scale = 1 / std::sqrt(static_cast<double>(q.size(2)));
  const at::Tensor o =
      AttentionOfTiles::apply(padded(q, width), for_each_head(k), for_each_head(v), std::move(tables), scale);
  return o.narrow(2, 0, v.size(2));
}

}  // namespace knapformer
