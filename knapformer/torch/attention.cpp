#include "knapformer/torch/attention.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "knapformer/core/util/error.h"

namespace knapformer {
namespace {

/// Saves the number of the step, by which a recomputation in another one shows.
class SaveStep : public torch::autograd::Function<SaveStep> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& o, int64_t step) {
    context->save_for_backward({at::scalar_tensor(step, at::kLong)});
    context->saved_data["step"] = step;
    return o.view(o.sizes());
  }

  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext* context,
                                          const std::vector<at::Tensor>& gradients) {
    const at::Tensor step = context->get_saved_variables()[0];  // recomputes
    in_backward([&] {
      if (step.item<int64_t>() != context->saved_data["step"].toInt()) throw_recomputed("attention");
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

at::Tensor recomputed_to_the_end(const at::Tensor& o, int64_t step) {
  const bool checkpointed = at::GradMode::is_enabled() && o.requires_grad() && at::SavedTensorDefaultHooks::get_hooks();
  return checkpointed ? SaveStep::apply(o, step) : o;
}

bool SharedAttention::travels(size_t level) const {
  const bool any_whole = tables.levels[0].degree == 1;
  return tables.levels[level].degree > 1 && (tables.any_shared || !any_whole);
}

int64_t SharedAttention::num_query_heads(size_t level, HeadCounts heads) const {
  const AttentionLevel& l = tables.levels[level];
  return std::ssize(head_partition(heads, l.head_parts())->query.of(l.index_in_group % l.head_parts()));
}

size_t SharedAttention::table_of(size_t level) const {
  size_t table = 0;
  for (size_t l = 0; l < level; ++l) table += tables.levels[l].degree > 1 ? 1 + tables.levels[l].stages.size() : 0;
  return table;
}

void SharedAttention::add_segment(ExchangeArguments& arguments, size_t level, size_t table,
                                  std::initializer_list<Moved> tensors) const {
  const AttentionLevel& of = tables.levels[level];
  SegmentArguments& segment = arguments.segments.emplace_back();
  segment.table = shared_tables[table];
  segment.sharing = of;
  for (const Moved& tensor : tensors) {
    segment.roles.push_back(tensor.role);
    arguments.names.push_back(text(tensor.name, "/", of.degree));
  }
}

ExchangeArguments SharedAttention::to_stage(size_t level, size_t stage, HeadCounts heads) const {
  ExchangeArguments arguments{.heads = heads, .group = group, .call = text("attention, stage ", stage + 1)};
  add_segment(arguments, level, table_of(level) + 1 + stage, {{"k", HeadRole::kKey}, {"v", HeadRole::kValue}});
  return arguments;
}

ExchangeArguments SharedAttention::to_sequences(HeadCounts heads) const {
  constexpr Moved kQ{"q", HeadRole::kQuery}, kK{"k", HeadRole::kKey}, kV{"v", HeadRole::kValue};
  ExchangeArguments arguments{.heads = heads, .group = group, .call = "attention"};
  for (size_t level = 0; level < tables.levels.size(); ++level) {
    if (!travels(level)) continue;
    const size_t table = table_of(level);
    if (tables.levels[level].cuts_queries()) {
      add_segment(arguments, level, table, {kQ});
      add_segment(arguments, level, table + 1, {kK, kV});
    } else {
      add_segment(arguments, level, table, {kQ, kK, kV});
    }
  }
  return arguments;
}

ExchangeArguments SharedAttention::to_rows(HeadCounts heads) const {
  ExchangeArguments arguments{.heads = heads, .group = group, .call = "attention"};
  for (size_t level = 0; level < tables.levels.size(); ++level) {
    if (!travels(level)) continue;
    add_segment(arguments, level, table_of(level), {{"o", HeadRole::kQuery}});
    SegmentArguments& segment = arguments.segments.back();
    segment.table = segment.table.inverse();
  }
  return arguments;
}

void SharedAttention::check_output(size_t level, const at::Tensor& o, const at::Tensor& q, HeadCounts heads) const {
  const int64_t num_heads = num_query_heads(level, heads);
  if (!o.defined() || o.dim() < 2 || o.size(0) != q.size(0) || o.size(1) != num_heads) {
    throw_argument("attend", o.defined() ? text("a result of shape ", o.sizes()) : std::string("no tensor"),
                   text("(", q.size(0), " tokens, ", num_heads, " heads, ...), as q has"));
  }
  if (o.device() != q.device())
    throw_argument("attend", text("a result on ", o.device()), text(q.device(), ", where q is"));
}

at::Tensor SharedAttention::attend_level(size_t level, const Inputs& qkv, HeadCounts heads,
                                         const Attend& attend) const {
  at::Tensor o = attend.kernel(qkv[0], qkv[1], qkv[2], attended[level]);
  check_output(level, o, qkv[0], heads);
  return o;
}

NextStage SharedAttention::stages_of(size_t level, Inputs first, Inputs rows, HeadCounts heads) const {
  return [this, level, rows = std::move(rows), heads, come = std::move(first), started = at::Tensor(),
          stage = size_t{0}]() mutable -> std::optional<KeyStage> {
    const std::vector<at::Tensor>& key_lens = attended[level].stage_key_lens;
    if (stage == key_lens.size()) return std::nullopt;
    if (stage > 0) come = finish_exchange(started);
    KeyStage next{.k = come[0], .v = come[1], .key_lens = key_lens[stage]};
    if (++stage < key_lens.size()) {
      started = start_exchange(rows, to_stage(level, stage, heads));
    }
    return next;
  };
}

at::Tensor SharedAttention::attend_to_stages(size_t level, const Inputs& first, const NextStage& next, HeadCounts heads,
                                             const Attend& attend) const {
  const at::Tensor &q = first[0], &v_of_first = first[2];
  at::Tensor o;
  if (attend.in_stages) o = attend.in_stages(q, v_of_first, attended[level].query_lens, next);
  if (o.defined()) {
    check_output(level, o, q, heads);
    if (next()) throw_argument("attend", "a result of some stages", "one of all of them");
    return o;
  }
  Inputs k, v;  // by sequence, chunk and stage: in the order of the sequences' tokens
  std::vector<std::vector<at::Tensor>> of_k, of_v;
  while (const std::optional<KeyStage> stage = next()) {
    const at::IntArrayRef sizes = tables.levels[level].stages[of_k.size()].slice_lens;
    of_k.push_back(stage->k.split_with_sizes(sizes));
    of_v.push_back(stage->v.split_with_sizes(sizes));
  }
  for (size_t slice = 0; slice < of_k[0].size(); ++slice) {
    for (size_t stage = 0; stage < of_k.size(); ++stage) {
      k.push_back(of_k[stage][slice]);
      v.push_back(of_v[stage][slice]);
    }
  }
  return attend_level(level, {q, at::cat(k), at::cat(v)}, heads, attend);
}

at::Tensor SharedAttention::run(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                const Attend& attend) const {
  const HeadCounts heads{.num_heads = q.size(1), .num_kv_heads = k.size(1)};
  const size_t first_shared = tables.levels[0].degree == 1 ? 1 : 0;
  const auto has_tokens = [&](size_t level) { return tables.levels[level].has_queries(); };
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
  Tensors shared_rows;
  for (size_t level = first_shared; level < inputs.size(); ++level) {
    shared_rows.insert(shared_rows.end(), inputs[level].begin(), inputs[level].end());
  }
  std::vector<Inputs> late(inputs.size());  // what comes in further stages on a rank that does not attend to it
  std::vector<at::Tensor> moved;
  if (first_shared == 1 && has_tokens(0)) {  // sequences that are whole here attend while the others travel
    const at::Tensor started = start_exchange(shared_rows, to_sequences(heads));
    outputs[0] = attend_level(0, inputs[0], heads, attend);
    moved = finish_exchange(started);
  } else {
    moved = run_exchange(shared_rows, to_sequences(heads));
  }
  for (size_t level = first_shared; level < inputs.size(); ++level) {
    const auto first = moved.begin() + static_cast<std::ptrdiff_t>(3 * (level - first_shared));
    const Inputs rows = {inputs[level][1], inputs[level][2]};
    inputs[level] = {first, first + 3};
    if (tables.levels[level].stages.size() > 1) {
      const NextStage next = stages_of(level, {first + 1, first + 3}, rows, heads);
      if (has_tokens(level)) {
        outputs[level] = attend_to_stages(level, inputs[level], next, heads, attend);
        continue;
      }
      next();  // which has come
      while (const std::optional<KeyStage> stage = next()) late[level].insert(late[level].end(), {stage->k, stage->v});
    }
    // The kernel also sees sequences of which this rank has no queries, each in its place.
    if (tables.levels[level].sequences.empty()) continue;
    at::Tensor o = attend_level(level, inputs[level], heads, attend);
    if (has_tokens(level)) outputs[level] = std::move(o);
  }
  fill_outputs_without_tokens(inputs, outputs, heads, attend);
  for (size_t level = first_shared; level < inputs.size(); ++level)
    outputs[level] = depending_on(std::move(outputs[level]), late[level]);

  const auto shared = outputs.begin() + static_cast<std::ptrdiff_t>(first_shared);
  std::ranges::move(run_exchange({shared, outputs.end()}, to_rows(heads)), shared);
  return outputs.size() == 1 ? outputs[0] : at::cat(outputs);
}

/// Gives levels without tokens on this rank an output of no rows, in the shape of the other levels' outputs and with
/// gradients where the level's outputs have them on its peers.
void SharedAttention::fill_outputs_without_tokens(const std::vector<Inputs>& inputs, std::vector<at::Tensor>& outputs,
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
