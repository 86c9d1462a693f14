#include "knapformer/torch/bag_attention.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/split_with_sizes.h>
#include <torch/csrc/autograd/custom_function.h>

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

class SaveSomething : public torch::autograd::Function<SaveSomething> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& o) {
    context->save_for_backward({at::empty({0})});
    return o.view(o.sizes());
  }

  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext*, const std::vector<at::Tensor>& gradients) {
    return gradients;
  }
};

/// One call of BagAttention::run. The first level is what is whole here, where the bag allows that; the others are
/// shared.
class AttentionCall {
 public:
  AttentionCall(const BagAttention& bag, const Attend& attend)
      : bag_(bag), levels_(bag.tables.levels), first_shared_(levels_[0].degree == 1 ? 1 : 0), attend_(attend) {}

  at::Tensor run(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
    if (any_whole() && !bag_.tables.any_shared) return attend_level(0, {q, k, v});
    split_by_level(q, k, v);
    exchange_inputs_and_attend_whole();
    attend_shared();
    fill_outputs_without_tokens();
    return exchange_outputs();
  }

 private:
  bool any_whole() const { return first_shared_ == 1; }

  at::Tensor attend_level(size_t level, const std::vector<at::Tensor>& qkv) const {
    at::Tensor o = attend_(qkv[0], qkv[1], qkv[2], bag_.seq_lens[level]);
    const int64_t num_heads = num_query_heads_of(levels_[level], bag_.heads);
    if (!o.defined() || o.dim() < 2 || o.size(0) != qkv[0].size(0) || o.size(1) != num_heads) {
      throw_argument("attend", o.defined() ? text("a result of shape ", o.sizes()) : std::string("no tensor"),
                     text("(", qkv[0].size(0), " tokens, ", num_heads, " heads, ...), as q has"));
    }
    if (o.device() != qkv[0].device()) {
      throw_argument("attend", text("a result on ", o.device()), text(qkv[0].device(), ", where q is"));
    }
    return o;
  }

  void split_by_level(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
    outputs_.resize(levels_.size());
    if (levels_.size() == 1) {
      inputs_.push_back({q, k, v});
      return;
    }
    std::vector<int64_t> rows;
    for (const AttentionLevel& level : levels_) rows.push_back(level.num_rows);
    const std::vector<at::Tensor> parts[] = {at::split_with_sizes(q, rows), at::split_with_sizes(k, rows),
                                             at::split_with_sizes(v, rows)};
    for (size_t level = 0; level < levels_.size(); ++level) {
      inputs_.push_back({parts[0][level], parts[1][level], parts[2][level]});
    }
  }

  /// What is whole here attends while what is shared travels.
  void exchange_inputs_and_attend_whole() {
    std::vector<RegionInput> regions;
    for (size_t level = first_shared_; level < levels_.size(); ++level) {
      regions.push_back({.table = bag_.shared_levels[level - first_shared_],
                         .tensors = inputs_[level],
                         .roles = {HeadRole::kQuery, HeadRole::kKeyValue, HeadRole::kKeyValue},
                         .sharing = sharing_of(levels_[level])});
    }
    const std::string label = label_of(levels_, {"q", "k", "v"});
    std::vector<at::Tensor> moved;
    if (any_whole() && sees_tokens(levels_[0])) {
      const at::Tensor started = start_exchange(regions, bag_.heads, *bag_.channel, label);
      outputs_[0] = attend_level(0, inputs_[0]);
      moved = finish_exchange(started);
    } else {
      moved = exchange(regions, bag_.heads, *bag_.channel, label);
    }
    for (size_t level = first_shared_; level < levels_.size(); ++level) {
      const auto first = moved.begin() + static_cast<std::ptrdiff_t>(3 * (level - first_shared_));
      inputs_[level] = {first, first + 3};
    }
  }

  void attend_shared() {
    for (size_t level = first_shared_; level < levels_.size(); ++level) {
      if (sees_tokens(levels_[level])) outputs_[level] = attend_level(level, inputs_[level]);
    }
  }

  /// Levels without tokens here give an output of no rows, of the shape that the others have.
  void fill_outputs_without_tokens() {
    const auto defined = [](const at::Tensor& o) { return o.defined(); };
    const auto first_shared = outputs_.begin() + static_cast<std::ptrdiff_t>(first_shared_);
    const bool any_shared_here = std::any_of(first_shared, outputs_.end(), defined);
    auto like = std::find_if(outputs_.begin(), outputs_.end(), defined);
    if (like == outputs_.end()) {
      like = first_shared;
      *like = attend_level(first_shared_, inputs_[first_shared_]);
    }
    for (size_t level = 0; level < levels_.size(); ++level) {
      if (outputs_[level].defined()) continue;
      std::vector<int64_t> shape = like->sizes().vec();
      shape[0] = 0;
      shape[1] = num_query_heads_of(levels_[level], bag_.heads);
      outputs_[level] = at::empty(shape, like->options()).set_requires_grad(like->requires_grad());
    }
    if (any_shared_here) return;
    for (size_t level = first_shared_; level < levels_.size(); ++level) {
      *first_shared = depending_on(inputs_[level], *first_shared);
    }
  }

  at::Tensor exchange_outputs() {
    std::vector<RegionInput> regions;
    for (size_t level = first_shared_; level < levels_.size(); ++level) {
      regions.push_back({.table = bag_.shared_levels[level - first_shared_].inverse(),
                         .tensors = {outputs_[level]},
                         .roles = {HeadRole::kQuery},
                         .sharing = sharing_of(levels_[level]).inverse()});
    }
    std::vector<at::Tensor> returned = exchange(regions, bag_.heads, *bag_.channel, label_of(levels_, {"o"}));
    if (any_whole()) returned.insert(returned.begin(), outputs_[0]);
    return returned.size() == 1 ? returned[0] : at::cat(returned);
  }

  const BagAttention& bag_;
  const std::vector<AttentionLevel>& levels_;
  size_t first_shared_;
  const Attend& attend_;
  std::vector<std::vector<at::Tensor>> inputs_;  // of each level: q, k, v, as attention sees them once exchanged
  std::vector<at::Tensor> outputs_;              // of each level
};

}  // namespace

at::Tensor repeated_whole(const at::Tensor& o) {
  const bool watched = at::GradMode::is_enabled() && o.requires_grad() && at::SavedTensorDefaultHooks::get_hooks();
  return watched ? SaveSomething::apply(o) : o;
}

HeadSharing sharing_of(const AttentionLevel& level) {
  return {.shared_end = HeadSharing::kSend, .degree = level.degree, .index_in_group = level.index_in_group};
}

int64_t num_query_heads_of(const AttentionLevel& level, HeadCounts heads) {
  return static_cast<int64_t>(
      partition_heads(heads.num_heads, heads.num_kv_heads, level.degree).query.of(level.index_in_group).size());
}

at::Tensor BagAttention::run(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const Attend& attend) const {
  return AttentionCall(*this, attend).run(q, k, v);
}

}  // namespace knapformer
