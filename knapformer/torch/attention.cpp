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

void check_planned_mask(const Mask& mask, const MicroBatchPlan& plan) {
  const auto described = [](const Mask& of, int64_t length) {
    return text("'", of.str(), "', which leaves ", of.pairs(length), " (query, key) pairs");
  };
  for (SequenceId id(0); id.value < plan.num_sequences(); ++id.value) {
    const int64_t length = plan.input().seq_lens[id];
    const Mask own = plan.input().mask_of(id);
    if (own.sees_as(mask, length)) continue;
    throw_argument("mask", text(described(mask, length), " of sequence ", id.value, " (", length, " tokens)"),
                   text(described(own, length), ", as the plan counts: the mask that the kernel applies"));
  }
}

void check_planned_cuts(const Attend& attend, const AttentionTables& tables) {
  for (const AttentionLevel& level : tables.levels) {
    if (attend.cuts_queries || !level.cuts_queries()) continue;
    throw_argument("attend", "a kernel of whole sequences",
                   text("one that takes parts of their queries (attend.cuts_queries), as ", level.degree,
                        " ranks share the queries of a sequence in ", level.query_parts,
                        " parts; or a plan of a TrainedModel without cuts_queries"));
  }
}

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
  return tables.levels[level].degree > 1 && (tables.any_shared || num_whole_levels() == 0);
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
  segment.sharing = static_cast<const HeadSharing&>(of);
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

NextStage SharedAttention::stages_of(size_t level, const LevelTensors& tensors, HeadCounts heads) const {
  return [this, level, keys = Inputs{tensors.rows[1], tensors.rows[2]}, heads,
          received = Inputs{tensors.received[1], tensors.received[2]}, started = at::Tensor(),
          stage = size_t{0}]() mutable -> std::optional<KeyStage> {
    const std::vector<at::Tensor>& key_lens = attended[level].stage_key_lens;
    if (stage == key_lens.size()) return std::nullopt;
    if (stage > 0) received = finish_exchange(started);
    KeyStage next{.k = received[0], .v = received[1], .key_lens = key_lens[stage]};
    if (++stage < key_lens.size()) started = start_exchange(keys, to_stage(level, stage, heads));
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

std::vector<SharedAttention::LevelTensors> SharedAttention::by_level(const Inputs& qkv) const {
  std::vector<LevelTensors> levels(tables.levels.size());
  std::vector<int64_t> num_rows;
  for (const AttentionLevel& level : tables.levels) num_rows.push_back(level.num_rows);
  for (const at::Tensor& tensor : qkv) {
    const std::vector<at::Tensor> parts = levels.size() == 1 ? Tensors{tensor} : tensor.split_with_sizes(num_rows);
    for (size_t level = 0; level < levels.size(); ++level) levels[level].rows.push_back(parts[level]);
  }
  return levels;
}

at::Tensor SharedAttention::run(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                const Attend& attend) const {
  const HeadCounts heads{.num_heads = q.size(1), .num_kv_heads = k.size(1)};
  const size_t num_whole = num_whole_levels();
  if (num_whole == 1 && !tables.any_shared) {
    at::Tensor o = attend_level(0, {q, k, v}, heads, attend);
    return tables.levels[0].has_queries() ? o : depending_on(std::move(o), {q, k, v});
  }

  std::vector<LevelTensors> levels = by_level({q, k, v});
  const std::span<LevelTensors> shared = std::span(levels).subspan(num_whole);
  Tensors sent;
  for (const LevelTensors& level : shared) sent.insert(sent.end(), level.rows.begin(), level.rows.end());
  Tensors received;
  if (num_whole == 1) levels[0].received = levels[0].rows;
  if (num_whole == 1 && tables.levels[0].has_queries()) {  // whole sequences attend while the others travel
    const at::Tensor started = start_exchange(sent, to_sequences(heads));
    levels[0].o = attend_level(0, levels[0].received, heads, attend);
    received = finish_exchange(started);
  } else {
    received = run_exchange(sent, to_sequences(heads));
  }
  for (auto next = received.begin(); LevelTensors & level : shared) {
    level.received = {next, next + 3};
    next += 3;
  }
  for (size_t level = num_whole; level < levels.size(); ++level) attend_shared(level, levels[level], heads, attend);
  fill_outputs_without_tokens(levels, heads, attend);

  Tensors outputs;
  for (LevelTensors& level : shared) outputs.push_back(depending_on(std::move(level.o), level.unattended));
  outputs = run_exchange(outputs, to_rows(heads));
  if (num_whole == 1) outputs.insert(outputs.begin(), levels[0].o);
  return outputs.size() == 1 ? outputs[0] : at::cat(outputs);
}

void SharedAttention::attend_shared(size_t level, LevelTensors& tensors, HeadCounts heads, const Attend& attend) const {
  const AttentionLevel& of = tables.levels[level];
  if (of.stages.size() > 1) {
    const NextStage next = stages_of(level, tensors, heads);
    if (of.has_queries()) {
      tensors.o = attend_to_stages(level, tensors.received, next, heads, attend);
      return;
    }
    next();  // the first, which is among those that the kernel gets
    while (const std::optional<KeyStage> stage = next())
      tensors.unattended.insert(tensors.unattended.end(), {stage->k, stage->v});
  }
  // The kernel also sees sequences of which this rank has no queries, each in its place.
  if (of.sequences.empty()) return;
  at::Tensor o = attend_level(level, tensors.received, heads, attend);
  if (of.has_queries()) tensors.o = std::move(o);
}

void SharedAttention::fill_outputs_without_tokens(std::span<LevelTensors> levels, HeadCounts heads,
                                                  const Attend& attend) const {
  const auto is_defined = [](const LevelTensors& level) { return level.o.defined(); };
  const std::span<LevelTensors> shared = levels.subspan(num_whole_levels());
  const bool any_shared_here = std::ranges::any_of(shared, is_defined);
  auto known = std::ranges::find_if(levels, is_defined);
  if (known == levels.end()) {
    known = levels.end() - std::ssize(shared);
    known->o = attend_level(num_whole_levels(), known->received, heads, attend);
  }
  const at::Tensor like = known->o;
  for (size_t level = 0; level < levels.size(); ++level) {
    if (levels[level].o.defined()) continue;
    std::vector<int64_t> shape = like.sizes().vec();
    shape[0] = 0;
    shape[1] = num_query_heads(level, heads);
    levels[level].o = at::empty(shape, like.options()).set_requires_grad(like.requires_grad());
  }
  if (any_shared_here) return;
  for (const LevelTensors& level : shared) shared[0].o = depending_on(std::move(shared[0].o), level.received);
}

}  // namespace knapformer
