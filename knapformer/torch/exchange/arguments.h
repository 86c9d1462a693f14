// The arguments of an exchange: one struct from the face to the resolved call, which autograd keeps for the backward.
//
// Tensors travel in *segments*: a segment is one exchange table and the tensors that travel by it. All segments of an
// exchange share one all-to-all of bytes, so tensors of any dtype travel together and arrive bit for bit.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "knapformer/core/plan/heads.h"
#include "knapformer/torch/comm/comm_group.h"
#include "knapformer/torch/exchange/packed_table.h"

namespace knapformer {

/// Which heads of a tensor meet a peer at a shared end. A tensor with a role is (rows, heads, ...).
enum class HeadRole : int64_t { kNone, kQuery, kKeyValue };

/// Heads of the whole model; 0 where no tensor has a role.
struct HeadCounts {
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;

  bool operator==(const HeadCounts&) const = default;
};

/// How the ranks of a segment share heads. Not read from the tables, whose values a traced graph does not know.
struct HeadSharing {
  enum End : int64_t { kNeither, kSend, kRecv };  // which end meets each peer with that peer's share alone
  End shared_end = kNeither;
  int32_t degree = 1;
  int32_t index_in_group = 0;

  HeadSharing inverse() const;
};

/// Which derivatives of a tensor travel: bits.
enum Derivative : int64_t { kGradient = 1, kTangent = 2 };

struct SegmentArguments {
  PackedTable table;
  std::vector<HeadRole> roles;  // of each of its tensors
  HeadSharing sharing;
};

struct ExchangeArguments {
  std::vector<at::Tensor> tensors = {};  // segment by segment; joined at the send end: one for each slot
  std::vector<SegmentArguments> segments = {};
  HeadCounts heads = {};
  /// The end at which segments, which have equal slots, share one tensor for each slot: its first num_local_rows rows
  /// do not travel, and behind them are those of the segments, in their order. What arrives there is written in place.
  HeadSharing::End joined_end = HeadSharing::kNeither;
  int64_t num_local_rows = 0;
  /// Joined at the receive end: of each slot, its rows that do not travel, for a whole exchange. None where there are
  /// none, and in an exchange in halves, whose finish takes them.
  std::vector<at::Tensor> local = {};
  /// Of each tensor, the bits of Derivative. Empty: in no_grad mode, outside of forward-mode differentiation.
  std::vector<int64_t> differentiable = {};
  std::string group;  // CommGroup::name
  std::string label;  // the call and its tensors, for messages: "route(x,features[0])"

  /// A segment and its tensors. One without tensors is left out.
  void add(PackedTable table, const std::vector<at::Tensor>& inputs, std::vector<HeadRole> roles,
           HeadSharing sharing = {});
  /// Decides which derivatives travel: those that tensors require or have, here and now; on a rank without rows, those
  /// that travel on the others. There it may be collective, when the call is a new one.
  void decide_derivatives();
  /// Adds what the tensors require or have and was not known of: transforms of functions, one in another, show each
  /// theirs alone.
  void add_derivatives();
  bool any(Derivative derivative) const;
  /// Of a tensor or output of this exchange, by its number. Of what is joined at the receive end: what any of its
  /// segments has.
  int64_t derivatives_at(size_t number) const;

  /// Of a joined end.
  size_t num_slots() const { return segments.front().roles.size(); }
  /// The tensor that has a slot's rows, by the number of the slot over all segments.
  const at::Tensor& input_of(size_t number) const { return tensors[number % tensors.size()]; }
  /// Of tensors that are joined at the send end: their rows that do not travel, as views.
  std::vector<at::Tensor> local_rows() const;

  /// The exchange of the gradients, with the ends swapped: of tensors whose gradient travels, and segments that have
  /// any. `gradients`: one for each output of this exchange.
  ExchangeArguments inverse(const std::vector<at::Tensor>& gradients) const;
  /// The exchange of the tangents (an exchange is linear), of which this one's tensors are freed.
  ExchangeArguments take_tangents();
  /// Gives outputs of this exchange the tangents that the exchange of them brought.
  void set_tangents(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& moved) const;
  /// What the inverse brought, by tensor of this exchange: undefined where no gradient travels.
  std::vector<at::Tensor> gradients_from(const std::vector<at::Tensor>& moved) const;

  /// Shapes of the outputs, from shapes of tensors alone: also for tensors without values.
  std::vector<std::vector<c10::SymInt>> output_shapes() const;
  /// What all ranks must agree on.
  Fingerprint fingerprint() const;

 private:
  void follow_others();
  void follow_other_levels();
  /// The exchange of the slots that have the derivative, without tables' ends swapped. input(number): of a slot; called
  /// once for each, or once for each of the first segment's where `joined`.
  template <class Input>
  ExchangeArguments of_slots(Derivative derivative, bool joined, const char* call, const char* suffix,
                             Input input) const;
};

/// Of the heads over the ranks that share them; empty where no tensor has a role.
/// Those of the last calls are kept: a step asks for the same ones again and again.
std::shared_ptr<const HeadPartition> head_partition(HeadCounts heads, int32_t degree);
/// Null: all columns meet every peer.
const HeadShares* shares_of(const HeadPartition& partition, HeadRole role);
/// Heads that a tensor with these shares has on this rank at one end.
int64_t num_heads_at(HeadSharing::End end, const HeadShares& shares, const HeadSharing& sharing);

}  // namespace knapformer
