#include "knapformer/torch/bag_attention.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/split_with_sizes.h>

#include <algorithm>
#include <string>

#include "knapformer/core/error.h"

namespace knapformer {
namespace {

bool sees_tokens(const AttentionLevel& level) { return !level.seq_lens.empty(); }

/// "attention(q/4,k/4,v/4)": of the levels, which are the same on all ranks of a bag.
std::string label_of(std::span<const AttentionLevel> levels, std::initializer_list<const char*> tensors) {
  std::string names;
  for (const AttentionLevel& level : levels) {
    if (level.degree == 1) continue;
    const std::string degree = std::to_string(level.degree);  // not text(): this is on the way of every call
    for (const char* tensor : tensors) names.append(names.empty() ? "" : ",").append(tensor).append("/").append(degree);
  }
  return "attention(" + names + ")";
}

/// What attention gave on tensors without rows need not depend on them. What came by an exchange must, or this rank
/// would be missing in the exchange of its gradients.
at::Tensor depending_on(const std::vector<at::Tensor>& inputs, at::Tensor o) {
  for (const at::Tensor& input : inputs) {
    if (input.requires_grad()) o = o + input.sum().to(o.scalar_type());
  }
  return o;
}

}  // namespace

HeadSharing sharing_of(const AttentionLevel& level) {
  return {.shared_end = HeadSharing::kSend, .degree = level.degree, .index_in_group = level.index_in_group};
}

int64_t BagAttention::num_heads_of(const AttentionLevel& level) const {
  return static_cast<int64_t>(
      partition_heads(heads.num_heads, heads.num_kv_heads, level.degree).query.of(level.index_in_group).size());
}

at::Tensor BagAttention::attend_level(size_t level, const std::vector<at::Tensor>& qkv, const Attend& attend) const {
  at::Tensor o = attend(qkv[0], qkv[1], qkv[2], seq_lens[level]);
  const int64_t num_heads = num_heads_of(tables.levels[level]);
  if (!o.defined() || o.dim() < 2 || o.size(0) != qkv[0].size(0) || o.size(1) != num_heads) {
    throw_argument("attend", o.defined() ? text("a result of shape ", o.sizes()) : std::string("no tensor"),
                   text("(", qkv[0].size(0), " tokens, ", num_heads, " heads, ...), as q has"));
  }
  if (o.device() != qkv[0].device()) {
    throw_argument("attend", text("a result on ", o.device()), text(qkv[0].device(), ", where q is"));
  }
  return o;
}

at::Tensor BagAttention::run(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const Attend& attend) const {
  const std::vector<AttentionLevel>& levels = tables.levels;
  const size_t first_shared = levels[0].degree == 1 ? 1 : 0;
  if (first_shared == 1 && !tables.any_shared) return attend_level(0, {q, k, v}, attend);

  // Of each level: q, k, v as attention sees them, then its output.
  std::vector<std::vector<at::Tensor>> inputs;
  if (levels.size() == 1) {
    inputs.push_back({q, k, v});
  } else {
    std::vector<int64_t> rows;
    for (const AttentionLevel& level : levels) rows.push_back(level.num_rows);
    const std::vector<at::Tensor> parts[] = {at::split_with_sizes(q, rows), at::split_with_sizes(k, rows),
                                             at::split_with_sizes(v, rows)};
    for (size_t level = 0; level < levels.size(); ++level) {
      inputs.push_back({parts[0][level], parts[1][level], parts[2][level]});
    }
  }
  std::vector<at::Tensor> outputs(levels.size());

  std::vector<RegionInput> regions;
  for (size_t level = first_shared; level < levels.size(); ++level) {
    regions.push_back({.table = shared_levels[level - first_shared],
                       .tensors = inputs[level],
                       .roles = {HeadRole::kQuery, HeadRole::kKeyValue, HeadRole::kKeyValue},
                       .sharing = sharing_of(levels[level])});
  }
  const std::string label = label_of(levels, {"q", "k", "v"});
  std::vector<at::Tensor> moved;
  if (first_shared == 1 && sees_tokens(levels[0])) {
    const at::Tensor started = start_exchange(regions, heads, *channel, label);
    outputs[0] = attend_level(0, inputs[0], attend);
    moved = finish_exchange(started);
  } else {
    moved = exchange(regions, heads, *channel, label);
  }
  bool any_shared_here = false;
  for (size_t level = first_shared; level < levels.size(); ++level) {
    const auto first = moved.begin() + static_cast<std::ptrdiff_t>(3 * (level - first_shared));
    inputs[level] = {first, first + 3};
    if (sees_tokens(levels[level])) outputs[level] = attend_level(level, inputs[level], attend);
    any_shared_here = any_shared_here || outputs[level].defined();
  }

  // Levels without tokens here, of the shape that others have.
  const auto with_tokens = std::find_if(outputs.begin(), outputs.end(), [](const auto& o) { return o.defined(); });
  const at::Tensor like = with_tokens != outputs.end()
                              ? *with_tokens
                              : (outputs[first_shared] = attend_level(first_shared, inputs[first_shared], attend));
  for (size_t level = 0; level < levels.size(); ++level) {
    if (!outputs[level].defined()) {
      std::vector<int64_t> shape = like.sizes().vec();
      shape[0] = 0;
      shape[1] = num_heads_of(levels[level]);
      outputs[level] = at::empty(shape, like.options()).set_requires_grad(like.requires_grad());
    }
  }
  if (!any_shared_here) outputs[first_shared] = depending_on(moved, outputs[first_shared]);

  regions.clear();
  for (size_t level = first_shared; level < levels.size(); ++level) {
    regions.push_back({.table = shared_levels[level - first_shared].inverse(),
                       .tensors = {outputs[level]},
                       .roles = {HeadRole::kQuery},
                       .sharing = sharing_of(levels[level]).inverse()});
  }
  std::vector<at::Tensor> returned = exchange(regions, heads, *channel, label_of(levels, {"o"}));
  if (first_shared == 1) returned.insert(returned.begin(), outputs[0]);
  return returned.size() == 1 ? returned[0] : at::cat(returned);
}

}  // namespace knapformer
