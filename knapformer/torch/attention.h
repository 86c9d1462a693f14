// Attention over the ranks of a bag, composed of exchanges and the user's kernel. Ulysses: each rank that shares a
// sequence sees all of its tokens and a share of the heads.
//
//   rows of this rank   | whole here (degree 1) | shared by 2 | shared by 4 |   all heads
//                             |                      `------------'
//                             |                     one all-to-all, in flight while sequences that are whole here
//                             attend
//                           attend                        |
//                             |                   attend      attend            whole sequences, heads / 2, heads / 4
//                             |                      `------------'
//                             |                     one all-to-all
//   rows of this rank   | whole here            | shared by 2 | shared by 4 |   all heads
//
// Another way of sharing a sequence (ring attention, say) is another composer beside Ulysses, with the same inputs. It
// offers the same, too: run() for Step::attention, and for compiled blocks the ExchangeArguments of what it moves.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "knapformer/core/plan/exchange_table.h"
#include "knapformer/torch/exchange/exchange.h"

namespace knapformer {

/// The kernel, over packed sequences. q: (tokens, heads, head_dim); k, v: (tokens, kv heads, ...); seq_lens: int32 CPU.
/// Returns o: (tokens, heads, ...).
using Attend = std::function<at::Tensor(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                        const at::Tensor& seq_lens)>;

/// A step's attention on one rank.
struct Ulysses {
  const AttentionTables& tables;
  std::span<const at::Tensor> seq_lens;        // for each level: int32 CPU
  std::span<const PackedTable> shared_tables;  // for each level that several ranks share
  std::string group;                           // the bag's, by name; empty where no level has several ranks

  /// q: (rows of this rank, heads, head_dim); k, v: (rows, kv heads, ...). Returns (rows, heads, ...). Collective over
  /// the bag: at most one all-to-all before attention and one after it, forward and backward each. `attend` is called
  /// once for each level that has tokens on this rank; on a rank without tokens it is called once, with none.
  at::Tensor run(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Attend& attend) const;

  /// The two exchanges of run(), without their tensors. Level by level, the first moves q, k, v from this rank's rows
  /// to whole sequences, and the second moves o back. They have no segments where no level travels.
  ExchangeArguments to_sequences(HeadCounts heads) const;
  ExchangeArguments to_rows(HeadCounts heads) const;

  /// Whether rows of this level travel in this step.
  bool travels(size_t level) const;
  /// How many query heads this rank has while sequences of this level are whole.
  int64_t num_query_heads(size_t level, HeadCounts heads) const;

 private:
  using Inputs = std::vector<at::Tensor>;  // q, k, v of a level

  ExchangeArguments exchange_of(std::initializer_list<std::pair<const char*, HeadRole>> tensors,
                                HeadCounts heads) const;
  at::Tensor attend_level(size_t level, const Inputs& qkv, HeadCounts heads, const Attend& attend) const;
  void fill_outputs_without_tokens(const std::vector<Inputs>& inputs, std::vector<at::Tensor>& outputs,
                                   HeadCounts heads, const Attend& attend) const;
};

/// Says that activation checkpointing ran `call` again under another plan.
[[noreturn]] void throw_recomputed(std::string_view call);
/// Returns `o`, and makes a recomputation of it (activation checkpointing) begin before the first exchange of gradients
/// and run up to this point. Torch begins a recomputation where the backward pass first needs a saved tensor, and stops
/// it by an exception once it has all of them. On a rank where `attend` saves nothing, or runs on other sequences than
/// its peers', the recomputation would begin after an exchange of gradients, and stop before an exchange that the peers
/// repeat. `plan`: the number of the plan in force; if the recomputation ran under another, the backward pass throws
/// StateError.
at::Tensor recomputed_to_the_end(const at::Tensor& o, int64_t plan);

}  // namespace knapformer
