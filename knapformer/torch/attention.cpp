#include "knapformer/torch/attention.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "knapformer/core/util/error.h"

namespace knapformer {
namespace {

/// Saves the number of the plan in force, by which a recomputation under another plan shows.
class SavePlan : public torch::autograd::Function<SavePlan> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& o, int64_t plan) {
    context->save_for_backward({at::scalar_tensor(plan, at::kLong)});
    context->saved_data["plan"] = plan;
    return o.view(o.sizes());
  }

  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext* context,
                                          const std::vector<at::Tensor>& gradients) {
    const at::Tensor plan = context->get_saved_variables()[0];  // recomputes
    in_backward([&] {
      if (plan.item<int64_t>() != context->saved_data["plan"].toInt()) throw_recomputed("attention");
    });
    return {gradients[0], at::Tensor()};
  }
};

/// For a rank without tokens: the kernel's result for tensors without rows need not depend on them. It must depend on
/// tensors that came by an exchange, or this rank would be missing in the exchange of their gradients.
at::Tensor depending_on(at::Tensor o, at::TensorList inputs) {
  for (const at::Tensor& input : inputs) {
    if (input.requires_grad()) o = o + input.sum().to(o.scalar_type());
  }
  return o;
}

}  // namespace

void throw_recomputed(std::string_view call) {
  throw StateError(
      text(call,
           ": computed again in the backward pass of an earlier plan, expected that of the last one: in blocks of your "
           "own call the same method of the step that was in force at their forward pass (step = balancer.current)"));
}

at::Tensor recomputed_to_the_end(const at::Tensor& o, int64_t plan) {
  const bool checkpointed = at::GradMode::is_enabled() && o.requires_grad() && at::SavedTensorDefaultHooks::get_hooks();
  return checkpointed ? SavePlan::apply(o, plan) : o;
}

bool Ulysses::travels(size_t level) const {
  const bool any_whole = tables.levels[0].degree == 1;
  return tables.levels[level].degree > 1 && (tables.any_shared || !any_whole);
}

int64_t Ulysses::num_query_heads(size_t level, HeadCounts heads) const {
  const AttentionLevel& l = tables.levels[level];
  return static_cast<int64_t>(head_partition(heads, l.degree)->query.of(l.index_in_group).size());
}

ExchangeArguments Ulysses::exchange_of(std::initializer_list<std::pair<const char*, HeadRole>> tensors,
                                       HeadCounts heads) const {
  ExchangeArguments arguments{.heads = heads, .group = group, .call = "attention"};
  arguments.segments.reserve(tables.levels.size());
  size_t next_table = 0;
  for (size_t level = 0; level < tables.levels.size(); ++level) {
    if (!travels(level)) continue;
    const int32_t degree = tables.levels[level].degree;
    SegmentArguments& segment = arguments.segments.emplace_back();
    segment.table = shared_tables[next_table++];
    segment.sharing = {
        .shared_end = HeadSharing::kSend, .degree = degree, .index_in_group = tables.levels[level].index_in_group};
    segment.roles.reserve(tensors.size());
    for (const auto& [name, role] : tensors) {
      segment.roles.push_back(role);
      arguments.names.push_back(text(name, "/", degree));
    }
  }
  return arguments;
}

ExchangeArguments Ulysses::to_sequences(HeadCounts heads) const {
  return exchange_of({{"q", HeadRole::kQuery}, {"k", HeadRole::kKeyValue}, {"v", HeadRole::kKeyValue}}, heads);
}

ExchangeArguments Ulysses::to_rows(HeadCounts heads) const {
  ExchangeArguments arguments = exchange_of({{"o", HeadRole::kQuery}}, heads);
  for (SegmentArguments& segment : arguments.segments) {
    segment.table = segment.table.inverse();
    segment.sharing = segment.sharing.inverse();
  }
  return arguments;
}

at::Tensor Ulysses::attend_level(size_t level, const Inputs& qkv, HeadCounts heads, const Attend& attend) const {
  at::Tensor o = attend(qkv[0], qkv[1], qkv[2], seq_lens[level]);
  const int64_t num_heads = num_query_heads(level, heads);
  if (!o.defined() || o.dim() < 2 || o.size(0) != qkv[0].size(0) || o.size(1) != num_heads) {
    throw_argument("attend", o.defined() ? text("a result of shape ", o.sizes()) : std::string("no tensor"),
                   text("(", qkv[0].size(0), " tokens, ", num_heads, " heads, ...), as q has"));
  }
  if (o.device() != qkv[0].device()) {
    throw_argument("attend", text("a result on ", o.device()), text(qkv[0].device(), ", where q is"));
  }
  return o;
}

at::Tensor Ulysses::run(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Attend& attend) const {
  const HeadCounts heads{.num_heads = q.size(1), .num_kv_heads = k.size(1)};
  const size_t first_shared = tables.levels[0].degree == 1 ? 1 : 0;
  const auto has_tokens = [&](size_t level) { return !tables.levels[level].seq_lens.empty(); };
  if (first_shared == 1 && !tables.any_shared) {
    at::Tensor o = attend_level(0, {q, k, v}, heads, attend);
    return has_tokens(0) ? o : depending_on(std::move(o), {q, k, v});
  }

  std::vector<int64_t> num_rows;
  for (const AttentionLevel& level : tables.levels) num_rows.push_back(level.num_rows);
  std::vector<Inputs> inputs(num_rows.size());  // of this rank's rows; where they travel, then of whole sequences
  for (const at::Tensor& tensor : {q, k, v}) {
    const std::vector<at::Tensor> of_levels =
        num_rows.size() == 1 ? std::vector{tensor} : tensor.split_with_sizes(num_rows);
    for (size_t level = 0; level < inputs.size(); ++level) inputs[level].push_back(of_levels[level]);
  }
  std::vector<at::Tensor> outputs(inputs.size());
  ExchangeArguments there = to_sequences(heads);
  for (size_t level = first_shared; level < inputs.size(); ++level) {
    there.tensors.insert(there.tensors.end(), inputs[level].begin(), inputs[level].end());
  }
  std::vector<at::Tensor> moved;
  if (first_shared == 1 && has_tokens(0)) {  // sequences that are whole here attend while the others travel
    const at::Tensor started = start_exchange(std::move(there));
    outputs[0] = attend_level(0, inputs[0], heads, attend);
    moved = finish_exchange(started);
  } else {
    moved = exchange(std::move(there));
  }
  for (size_t level = first_shared; level < inputs.size(); ++level) {
    const auto first = moved.begin() + static_cast<std::ptrdiff_t>(3 * (level - first_shared));
    inputs[level] = {first, first + 3};
    if (has_tokens(level)) outputs[level] = attend_level(level, inputs[level], heads, attend);
  }
  fill_outputs_without_tokens(inputs, outputs, heads, attend);

  const auto shared = outputs.begin() + static_cast<std::ptrdiff_t>(first_shared);
  ExchangeArguments back = to_rows(heads);
  back.tensors = {shared, outputs.end()};
  std::ranges::move(exchange(std::move(back)), shared);
  return outputs.size() == 1 ? outputs[0] : at::cat(outputs);
}

/// Gives levels without tokens on this rank an output of no rows, in the shape of the other levels' outputs and with
/// gradients where the level's outputs have them on its peers.
void Ulysses::fill_outputs_without_tokens(const std::vector<Inputs>& inputs, std::vector<at::Tensor>& outputs,
                                          HeadCounts heads, const Attend& attend) const {
  const size_t first_shared = tables.levels[0].degree == 1 ? 1 : 0;
  const auto defined = [](const at::Tensor& o) { return o.defined(); };
  const auto shared = outputs.begin() + static_cast<std::ptrdiff_t>(first_shared);
  const bool any_shared_here = std::any_of(shared, outputs.end(), defined);
  auto like = std::find_if(outputs.begin(), outputs.end(), defined);
  if (like == outputs.end()) {
    like = shared;
    *like = attend_level(first_shared, inputs[first_shared], heads, attend);
  }
  for (size_t level = 0; level < outputs.size(); ++level) {
    if (outputs[level].defined()) continue;
    std::vector<int64_t> shape = like->sizes().vec();
    shape[0] = 0;
    shape[1] = num_query_heads(level, heads);
    outputs[level] = at::empty(shape, like->options()).set_requires_grad(like->requires_grad());
  }
  if (any_shared_here) return;
  for (size_t level = first_shared; level < inputs.size(); ++level)
    *shared = depending_on(std::move(*shared), inputs[level]);
}

}  // namespace knapformer
