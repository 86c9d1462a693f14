#include "knapformer/torch/step.h"

#include <c10/util/Exception.h>

#include <utility>

#include "knapformer/core/util/error.h"

namespace knapformer {
namespace {

/// Whether ranks exchange with nobody: all rows stay where they are.
bool is_identity(const ExchangeTable& table) { return table.num_peers == 1; }

/// What a call returns where nothing moves: another tensor on the same memory.
at::Tensor as_view(const at::Tensor& tensor) { return tensor.view(tensor.sizes()); }

/// A plan that was not told the number of heads counts even shares.
void warn_of_unknown_heads(const RankPlan& on_rank, int64_t num_heads, int64_t num_kv_heads) {
  if (on_rank.plan->input().model.num_heads != 0) return;
  const AttentionShares shares(static_cast<int32_t>(num_heads), static_cast<int32_t>(num_kv_heads));
  for (const AttentionLevel& level : on_rank.attention.levels) {
    if (level.sequences.empty() || shares.is_even(level.head_parts())) continue;
    TORCH_WARN_ONCE("knapformer: num_heads: got none, for ", num_heads, " heads (", num_kv_heads, " of keys), which ",
                    level.degree, " ranks share unevenly, unlike in the plan: expected num_heads= of the balancer");
  }
}

std::vector<at::Tensor> as_views(at::TensorList tensors) {
  std::vector<at::Tensor> views;
  for (const at::Tensor& tensor : tensors) views.push_back(as_view(tensor));
  return views;
}

/// A dense tensor of `num_rows` rows and at least `min_dims` dimensions. `rows` says in messages what it has rows for.
void check_rows(const at::Tensor& tensor, std::string_view argument, int64_t num_rows, std::string_view rows,
                int64_t min_dims) {
  if (!tensor.defined()) throw_argument(argument, "no tensor", "a tensor");
  if (tensor.is_quantized()) throw_argument(argument, "a quantized tensor", "one that is not");
  if (tensor.layout() != at::kStrided) {
    throw_argument(argument, text("a tensor of layout ", tensor.layout()), "a dense tensor");
  }
  if (tensor.dim() < min_dims) {
    throw_argument(argument, text("a tensor of shape ", tensor.sizes()), text("at least ", min_dims, " dimensions"));
  }
  if (tensor.size(0) != num_rows) {
    throw_argument(argument, text(tensor.size(0), " rows (shape ", tensor.sizes(), ")"),
                   text(num_rows, " rows, one for each ", rows));
  }
}

void check_device(const at::Tensor& tensor, std::string_view argument, const at::Tensor& as, std::string_view as_name) {
  if (tensor.device() != as.device())
    throw_argument(argument, tensor.device(), text(as.device(), ", the device of ", as_name));
}

void check_has_memory(const at::Tensor& tensor, std::string_view argument) {
  if (tensor.is_meta()) throw_argument(argument, "a tensor on meta", "one on a device that has its values");
}

/// What a tensor has rows for, in messages.
constexpr const char* kOwnToken = "token of this rank's sequences";
constexpr const char* kOwnSequence = "sequence of this rank";
constexpr const char* kChunkToken = "token of the chunks that this rank holds";

}  // namespace

std::shared_ptr<Plan> Step::step_plan() const {
  const std::shared_ptr<Plan>& of = rank_plan_->of_step;
  return of->num_micro_batches() == 1 ? of : std::make_shared<Plan>(*rank_plan_->plan);
}

void Step::await_agreement() const {
  if (rank_plan_->agreement) std::exchange(rank_plan_->agreement, std::nullopt)->await(*ranks_->all());
}

const RankPlan::PackedTables& Step::tables_on(at::Device device) const {
  await_agreement();
  return rank_plan_->tables_on(ranks_->known_device(device));
}

void Step::check_mask(const KernelMask& mask) const {
  if (!mask || mask == rank_plan_->kernel_mask || mask == rank_plan_->common_mask) return;
  check_planned_mask(*mask, plan());
  rank_plan_->kernel_mask = mask;
}

SharedAttention Step::shared_attention(at::Device device) const {
  SharedAttention made{
      .tables = rank_plan_->attention, .attended = rank_plan_->attended, .shared_tables = {}, .group = {}};
  if (ranks_->bag()) {
    made.shared_tables = tables_on(device).attention();
    made.group = ranks_->bag();
  }
  return made;
}

Step::Routed Step::route(const at::Tensor& x, at::TensorList features, at::TensorList sequence_features) const {
  return ranks_->collective([&]() -> Routed {
    RankPlan& s = *rank_plan_;
    check_rows(x, "x", s.route.tokens.send.num_rows, kOwnToken, 1);
    check_has_memory(x, "x");
    ExchangeArguments arguments{.call = "route", .names = {"x"}};
    Tensors tensors = {x};
    const auto add = [&](const char* list, at::TensorList given, int64_t num_rows, const char* rows) {
      for (size_t i = 0; i < given.size(); ++i) {
        arguments.names.push_back(text(list, "[", i, "]"));
        check_rows(given[i], arguments.names.back(), num_rows, rows, 1);
        check_device(given[i], arguments.names.back(), x, "x");
        tensors.push_back(given[i]);
      }
    };
    add("features", features, s.route.tokens.send.num_rows, kOwnToken);
    add("sequence_features", sequence_features, s.route.sequences.send.num_rows, kOwnSequence);
    if (is_identity(s.route.tokens)) {
      return {.x = as_view(x), .features = as_views(features), .sequence_features = as_views(sequence_features)};
    }
    const RankPlan::PackedTables& tables = tables_on(x.device());
    arguments.group = ranks_->all();
    arguments.add(tables.tokens(), 1 + features.size());
    arguments.add(tables.sequences(), sequence_features.size());
    const Tensors moved = run_exchange(tensors, std::move(arguments));
    const auto first_sequence_feature = moved.begin() + 1 + static_cast<std::ptrdiff_t>(features.size());
    return {.x = moved[0],
            .features = {moved.begin() + 1, first_sequence_feature},
            .sequence_features = {first_sequence_feature, moved.end()}};
  });
}

at::Tensor Step::reverse_route(const at::Tensor& x) const {
  return ranks_->collective([&] {
    RankPlan& s = *rank_plan_;
    check_rows(x, "x", s.route.tokens.recv.num_rows, kChunkToken, 1);
    check_has_memory(x, "x");
    if (is_identity(s.route.tokens)) return as_view(x);
    ExchangeArguments arguments{.group = ranks_->all(), .call = "reverse_route", .names = {"x"}};
    arguments.add(tables_on(x.device()).tokens().inverse(), 1);
    return run_exchange({x}, std::move(arguments))[0];
  });
}

void Step::check_attention_inputs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) const {
  const int64_t num_rows = rank_plan_->route.tokens.recv.num_rows;
  check_rows(q, "q", num_rows, kChunkToken, 3);
  check_rows(k, "k", num_rows, kChunkToken, 3);
  check_rows(v, "v", num_rows, kChunkToken, 3);
  check_has_memory(q, "q");
  check_device(k, "k", q, "q");
  check_device(v, "v", q, "q");
  if (v.size(1) != k.size(1)) throw_argument("v", text(v.size(1), " heads"), text(k.size(1), " heads, as k has"));
  static_cast<void>(partition_heads(q.size(1), k.size(1), 1));  // checks the counts
  warn_of_unknown_heads(*rank_plan_, q.size(1), k.size(1));
}

void Step::check_flat(std::string_view call) const {
  const bool cuts = rank_plan_->attention.levels[0].cuts_queries();
  if (ranks_->topology().is_flat() && !cuts) return;
  throw StateError(text(call, ": got the topology ", ranks_->topology().str(),
                        cuts ? ", whose ranks share queries" : "",
                        ", expected flat bags, such as g4n2, of ranks that share heads alone: others attend by "
                        "attention(q, k, v, attend)"));
}

at::Tensor Step::attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Attend& attend,
                           const KernelMask& mask) const {
  const at::Tensor o = ranks_->collective([&] {
    check_attention_inputs(q, k, v);
    check_mask(mask);
    check_planned_cuts(attend, rank_plan_->attention);
    if (ranks_->all()) ranks_->known_device(q.device());  // for plans to come, as the next
    if (attend.takes_masks) {
      ranks_->known_device(q.device()).takes_masks = true;
      rank_plan_->make_masks();
    }
    return shared_attention(q.device()).run(q, k, v, attend);
  });
  return recomputed_to_the_end(o, rank_plan_->number);  // out here: what ends a recomputation is no error to tell
}

Step::AttentionInputs Step::pre_attn(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                     const KernelMask& mask) const {
  return ranks_->collective([&]() -> AttentionInputs {
    RankPlan& s = *rank_plan_;
    check_flat("pre_attn");
    check_attention_inputs(q, k, v);
    check_mask(mask);
    s.heads = {.num_heads = q.size(1), .num_kv_heads = k.size(1)};
    if (s.attention.levels[0].degree == 1) {
      return {.seq_lens = s.attended[0].query_lens, .q = as_view(q), .k = as_view(k), .v = as_view(v)};
    }
    ExchangeArguments arguments = shared_attention(q.device()).to_sequences(s.heads);
    arguments.call = "pre_attn";
    arguments.names = {"q", "k", "v"};
    const Tensors moved = run_exchange({q, k, v}, std::move(arguments));
    return {.seq_lens = s.attended[0].query_lens, .q = moved[0], .k = moved[1], .v = moved[2]};
  });
}

at::Tensor Step::post_attn(const at::Tensor& o) const {
  const at::Tensor whole = ranks_->collective([&] {
    RankPlan& s = *rank_plan_;
    check_flat("post_attn");
    if (s.heads.num_heads == 0)
      throw StateError("pre_attn: has not been called since plan_routing, expected before post_attn");
    const AttentionLevel& level = s.attention.levels[0];
    const int64_t num_rows = level.degree == 1 ? s.route.tokens.recv.num_rows : level.queries.recv.num_rows;
    check_rows(o, "o", num_rows, "token of the sequences that attention saw", 2);
    check_has_memory(o, "o");
    const SharedAttention composer = shared_attention(o.device());
    const int64_t num_heads = composer.num_query_heads(0, s.heads);
    if (o.size(1) != num_heads)
      throw_argument("o", text(o.size(1), " heads"), text(num_heads, " heads, this rank's share"));
    if (level.degree == 1) return as_view(o);
    ExchangeArguments arguments = composer.to_rows(s.heads);
    arguments.call = "post_attn";
    arguments.names = {"o"};
    return run_exchange({o}, std::move(arguments))[0];
  });
  return recomputed_to_the_end(whole, rank_plan_->number);
}

}  // namespace knapformer
