// Attention over the ranks of a bag, composed of exchanges and the user's kernel. A rank that shares a sequence attends
// with a share of the heads, and where queries are cut (knapformer/core/plan/attention_shares.h) with a part of the
// queries, to all keys that these see. Ulysses is the case of one part.
//
//   rows of this rank   | whole here (degree 1) | shared by 2 | shared by 4 |   all heads
//                             |                      `------------'
//                             |                     one all-to-all, in flight while sequences that are whole here
//                             attend
//                           attend                        |
//                             |                   attend      attend            whole sequences, heads / 2, heads / 4
//                             |                      `------------'             (or a part of their queries)
//                             |                     one all-to-all
//   rows of this rank   | whole here            | shared by 2 | shared by 4 |   all heads
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "knapformer/core/plan/attention_tables.h"
#include "knapformer/torch/exchange/exchange.h"
#include "knapformer/torch/mask_tables.h"

namespace knapformer {

/// Where the rows of attention lie: int32 CPU, a number for each sequence.
struct SequenceRows {
  at::Tensor query_lens, key_lens;
  at::Tensor query_starts;                      // of the first query, counted from the first key
  std::vector<at::Tensor> stage_key_lens = {};  // where keys come in stages: those of each
  std::shared_ptr<MaskTables> masks = {};       // for a kernel that takes them: what each query sees
};

/// Keys and values of a stage, with the number of keys of each sequence.
struct KeyStage {
  at::Tensor k, v, key_lens;
};
/// The next stage; none after the last one. Waits for it, and starts the exchange of the one after it.
using NextStage = std::function<std::optional<KeyStage>()>;

/// The kernel, over packed sequences.
struct Attend {
  /// Of q (queries, heads, head_dim) and of k, v (keys, kv heads, ...) it returns o (queries, heads, ...).
  std::function<at::Tensor(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const SequenceRows& rows)>
      kernel;
  /// Whether it goes by all of SequenceRows, with a part of each sequence's queries: otherwise it takes whole
  /// sequences, by query_lens alone.
  bool cuts_queries = false;
  /// Whether it goes by SequenceRows::masks, the planned mask of each sequence.
  bool takes_masks = false;
  /// Where keys come in stages: attends to each stage while the next one travels, and merges the results. Unset: all
  /// are put together for the kernel. Undefined where it cannot merge for such q and v: then it has taken no stage.
  std::function<at::Tensor(const at::Tensor& q, const at::Tensor& v, const at::Tensor& query_lens,
                           const NextStage& next)>
      in_stages = {};
};

/// A step's attention on one rank.
struct SharedAttention {
  const AttentionTables& tables;
  std::span<const SequenceRows> attended;      // for each level
  std::span<const PackedTable> shared_tables;  // for each level that several ranks share: queries, and keys if any
  std::shared_ptr<CommGroup> group;            // the bag's; null where no level has several ranks

  /// q: (rows of this rank, heads, head_dim); k, v: (rows, kv heads, ...). Returns (rows, heads, ...). Collective over
  /// the bag: at most one all-to-all before attention, one more for each further stage of keys, and one after it,
  /// forward and backward each. `attend` is called once for each level that has sequences on this rank, of which it may
  /// have no queries; on a rank without queries it is called once more, with none.
  at::Tensor run(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Attend& attend) const;

  /// The two exchanges of run(), without their tensors. Level by level, the first moves q, k, v from this rank's rows
  /// to whole sequences, and the second moves o back. They have no segments where no level travels.
  /// With stages, to_sequences moves the first one's keys.
  ExchangeArguments to_sequences(HeadCounts heads) const;
  ExchangeArguments to_rows(HeadCounts heads) const;

  /// The exchange of the keys and values of a further stage.
  ExchangeArguments to_stage(size_t level, size_t stage, HeadCounts heads) const;

  /// Whether rows of this level travel in this step.
  bool travels(size_t level) const;
  /// How many query heads this rank attends with at this level.
  int64_t num_query_heads(size_t level, HeadCounts heads) const;

 private:
  using Inputs = Tensors;  // q, k, v of a level
  struct LevelTensors {
    Inputs rows;         // of this rank
    Inputs received;     // of the sequences that it attends to; where keys come in stages, of the first one
    Tensors unattended;  // k and v of further stages, on a rank without queries
    at::Tensor o;
  };

  /// Levels of degree 1, which is the first one if it is there: these do not travel.
  size_t num_whole_levels() const { return tables.levels[0].degree == 1 ? 1 : 0; }
  std::vector<LevelTensors> by_level(const Inputs& qkv) const;
  struct Moved {
    const char* name;
    HeadRole role;
  };
  void add_segment(ExchangeArguments& arguments, size_t level, size_t table,
                   std::initializer_list<Moved> tensors) const;
  /// Of shared_tables, that of a level's queries; those of its stages follow.
  size_t table_of(size_t level) const;
  at::Tensor attend_level(size_t level, const Inputs& qkv, HeadCounts heads, const Attend& attend) const;
  /// The stages of a level, one by one. The first one has come already.
  NextStage stages_of(size_t level, const LevelTensors& tensors, HeadCounts heads) const;
  /// first: q, and k and v of the first stage.
  at::Tensor attend_to_stages(size_t level, const Inputs& first, const NextStage& next, HeadCounts heads,
                              const Attend& attend) const;
  /// Sets the output of a level whose tensors have come, where this rank has queries of it.
  void attend_shared(size_t level, LevelTensors& tensors, HeadCounts heads, const Attend& attend) const;
  void check_output(size_t level, const at::Tensor& o, const at::Tensor& q, HeadCounts heads) const;
  /// Gives levels without tokens on this rank an output of no rows, in the shape of the other levels' outputs and with
  /// gradients where the level's outputs have them on its peers.
  void fill_outputs_without_tokens(std::span<LevelTensors> levels, HeadCounts heads, const Attend& attend) const;
};

/// Throw ArgumentError where the plan has another mask for any sequence, or cuts queries and `attend` takes whole ones.
void check_planned_mask(const Mask& mask, const MicroBatchPlan& plan);
void check_planned_cuts(const Attend& attend, const AttentionTables& tables);

/// Says that activation checkpointing ran `call` again under another plan.
[[noreturn]] void throw_recomputed(std::string_view call);
/// Returns `o`, and makes a recomputation of it (activation checkpointing) begin before the first exchange of gradients
/// and run up to this point. Torch begins a recomputation where the backward pass first needs a saved tensor, and stops
/// it by an exception once it has all of them. On a rank where `attend` saves nothing, or runs on other sequences than
/// its peers', the recomputation would begin after an exchange of gradients, and stop before an exchange that the peers
/// repeat. `step`: its number; if the recomputation ran in another, the backward pass throws StateError.
at::Tensor recomputed_to_the_end(const at::Tensor& o, int64_t step);

}  // namespace knapformer
