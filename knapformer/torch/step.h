// Step: a plan on this rank, with the tables and the groups by which its tensors move. A value: copies are the same
// step, and it goes on holding all that it needs, whatever is planned after it. So code that is run again in a backward
// pass (activation checkpointing), an evaluation amid a step, and several models each go by the step that they hold.
//
//   auto [x, features, conditioning] = step.route(x, {ids}, {conditioning});  // chunks of step.chunk_lens()
//     h = step.attention(q, k, v, attend);              // (chunk tokens, heads, head_dim), there and back
//   x = step.reverse_route(x);                          // back home, in the order of step.seq_lens()
//
// Collective: all ranks of the group call route and reverse_route in the same order, also ranks without sequences; all
// ranks of a bag call attention, pre_attn and post_attn. Gradients flow through all of them, so the backward pass is
// collective too. An error on one rank becomes an error on all, which then need a new balancer. So do steps that
// differ: ranks compare their numbers. Where nothing moves, results are views of the arguments: write into neither.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string_view>
#include <vector>

#include "knapformer/torch/attention.h"
#include "knapformer/torch/rank_plan.h"
#include "knapformer/torch/ranks.h"

namespace knapformer {

class Step {
 public:
  Step(std::shared_ptr<Ranks> ranks, std::shared_ptr<RankPlan> plan)
      : ranks_(std::move(ranks)), rank_plan_(std::move(plan)) {}

  struct Routed {
    at::Tensor x;  // (tokens of the chunks that this rank now holds, ...), as features
    std::vector<at::Tensor> features;
    std::vector<at::Tensor> sequence_features;  // (chunks, ...)
  };
  /// x and features: (tokens of this rank, ...), any dtype each. sequence_features: (sequences of this rank, ...): a
  /// row goes to every rank that holds a chunk of its sequence; its gradient is the sum from all of them.
  Routed route(const at::Tensor& x, at::TensorList features = {}, at::TensorList sequence_features = {}) const;

  /// x: (tokens of the chunks, ...), in the order in which route gave them. Returns (tokens of this rank, ...).
  at::Tensor reverse_route(const at::Tensor& x) const;

  struct AttentionInputs {
    at::Tensor seq_lens;  // int32 CPU: tokens of the sequences that attention sees, whole
    at::Tensor q, k, v;   // (tokens of these, this rank's share of the heads, head_dim)
  };
  /// q: (chunk tokens, heads, head_dim); k and v: (chunk tokens, kv heads, head_dim), kv heads a divisor of heads.
  /// Where the bag's size does not divide them, shares are uneven (knapformer/core/plan/attention_shares.h). For flat
  /// topologies, as post_attn: in a nested bag a rank has another share of the heads at each level. mask: the one that
  /// the kernel applies. Throws ArgumentError where another one was planned for any sequence of any rank.
  AttentionInputs pre_attn(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const KernelMask& mask = Mask()) const;

  /// o: (tokens of the sequences that attention saw, this rank's share of the query heads, ...). Returns (chunk tokens,
  /// heads, ...).
  at::Tensor post_attn(const at::Tensor& o) const;

  /// Attention of chunk tokens over their whole sequences, in flat and nested bags (attention.h). q, k, v as in
  /// pre_attn, and mask; returns (chunk tokens, heads, ...). Throws ArgumentError where queries are cut and `attend`
  /// takes whole sequences alone, and on all ranks where it takes masks that say of no pair whether it is seen.
  at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Attend& attend,
                       const KernelMask& mask = Mask()) const;

  /// The text of the mask of every sequence, where all have the same one.
  std::optional<std::string> common_mask() const {
    return rank_plan_->common_mask ? std::optional(rank_plan_->common_mask->str()) : std::nullopt;
  }

  /// Of the micro-batch.
  const MicroBatchPlan& plan() const { return *rank_plan_->plan; }
  /// The same as a step of its own: where the plan has one micro-batch, the plan itself.
  std::shared_ptr<Plan> step_plan() const;
  /// int32 CPU: tokens of this rank's sequences, and of the chunks that this rank holds.
  const at::Tensor& seq_lens() const { return rank_plan_->seq_lens; }
  const at::Tensor& chunk_lens() const { return rank_plan_->chunk_lens; }
  /// What it took to make the plan and its tables.
  double planning_s() const { return rank_plan_->planning_s; }
  /// Counted alike on all ranks as they plan, so that messages name steps by it. No other step of this balancer has it.
  int64_t number() const { return rank_plan_->number; }
  /// Waits until it is known that all ranks have the same plan, where each made it by itself.
  void await_agreement() const;
  /// Tells the other ranks that this one failed outside of these methods, as SequenceBalancer::report does.
  void report(const std::exception& error) const noexcept { ranks_->report(error); }

 private:
  const RankPlan::PackedTables& tables_on(at::Device device) const;
  void check_attention_inputs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) const;
  /// Where sequences have several masks, looks at each of them once a plan.
  void check_mask(const KernelMask& mask) const;
  SharedAttention shared_attention(at::Device device) const;
  void check_flat(std::string_view call) const;

  std::shared_ptr<Ranks> ranks_;
  std::shared_ptr<RankPlan> rank_plan_;
};

}  // namespace knapformer
