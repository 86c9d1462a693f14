// Plan: an optimizer step of one or several micro-batches, planned at once. Like a MicroBatchPlan, it does not change.
//
// With gradient accumulation a step's gradient is the sum over its micro-batches, so any of them may compute a
// sequence. The plan says which micro-batch computes each sequence, and each micro-batch has a MicroBatchPlan of its
// sequences, with their home ranks. A micro-batch may leave ranks, or all of them, without tokens.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "knapformer/core/plan/micro_batch_plan.h"

namespace knapformer {

/// Where ranks wait for each other.
enum class StepSync {
  kMicroBatch,  // in every micro-batch (FSDP2, ZeRO-3): the step is the sum of their slowest ranks
  kStep,        // once, at the step's end (DDP, ZeRO-1 and 2 with no_sync): the step is the slowest rank's sum
};
/// "micro_batch", "step". Throws ArgumentError (argument "sync").
StepSync parse_step_sync(std::string_view name);
std::string_view step_sync_name(StepSync sync);

struct StepInput {
  /// All sequences of the step; max_tokens_per_rank is the limit in every micro-batch.
  PlanInput sequences = {};
  int32_t num_micro_batches = 1;
  StepSync sync = StepSync::kMicroBatch;

  static constexpr int32_t kMaxMicroBatches = 1 << 12;
  /// Throws ArgumentError, which names the argument.
  void validate() const;
  /// The sequences as if they were one micro-batch's, whose ranks may hold as many tokens as in all of them.
  PlanInput all_at_once() const;
  bool operator==(const StepInput&) const = default;
};

/// The input of each micro-batch: its sequences, in the step's order, on their home ranks. `micro_batches`: the
/// micro-batch of every sequence, by id.
std::vector<PlanInput> micro_batch_inputs(const StepInput& input, std::span<const int32_t> micro_batches);

/// The micro-batch of every sequence if none is chosen: each rank's list is cut into consecutive parts of as equal
/// counts as possible, the longer parts first.
std::vector<int32_t> micro_batches_as_given(const SequenceLengths& seq_lens, int32_t num_micro_batches);

/// The plan of each micro-batch in which sequences lie as given. `placements` are indexed by the step's ids; chunk_lens
/// has `degree` of them for each, in the same order; `solvers` are indexed by micro-batch.
std::vector<MicroBatchPlan> plans_as_placed(const StepInput& input, std::span<const int32_t> micro_batches,
                                            std::span<const Placement> placements, std::span<const int64_t> chunk_lens,
                                            std::span<const std::string> solvers);

class Plan {
 public:
  /// `plans`: one for each micro-batch, with its input from micro_batch_inputs. With one, sync makes no difference, and
  /// is kMicroBatch.
  Plan(StepInput input, std::vector<int32_t> micro_batches, std::vector<MicroBatchPlan> plans);
  /// A step of one micro-batch.
  Plan(MicroBatchPlan plan);

  const StepInput& input() const { return input_; }
  int32_t num_micro_batches() const { return input_.num_micro_batches; }
  /// The micro-batch of every sequence of the step, by id.
  const std::vector<int32_t>& micro_batches() const { return micro_batches_; }
  /// The plan of every micro-batch. The ids of a plan count up through its own sequences.
  const std::vector<MicroBatchPlan>& plans() const { return plans_; }
  const SequenceLengths& seq_lens() const { return input_.sequences.seq_lens; }
  int32_t num_ranks() const { return seq_lens().num_ranks(); }
  const std::string& solver() const { return plans_.front().solver(); }
  /// The step's ids of a micro-batch's sequences, ascending. The index is the id in the micro-batch's plan.
  std::vector<SequenceId> sequences_of(int32_t micro_batch) const;
  /// visit(id, plan, its id in that plan) for each sequence of the step, with the plan of its micro-batch.
  template <class Visit>
  void for_each_sequence(Visit visit) const {
    std::vector<int32_t> next(plans_.size());
    for (size_t s = 0; s < micro_batches_.size(); ++s) {
      const int32_t k = micro_batches_[s];
      visit(SequenceId(s), plans_[k], SequenceId(next[k]++));
    }
  }
  /// What a rank holds in a micro-batch, in the order of its rows, with the step's ids.
  std::vector<Chunk> chunks_on(Rank rank, int32_t micro_batch) const;
  /// The indices, ascending, of those sequences in a rank's own list that a micro-batch computes.
  std::vector<int32_t> home_sequences(Rank rank, int32_t micro_batch) const;

  int64_t num_tokens() const { return sum_of(&MicroBatchPlan::num_tokens); }
  /// Tokens of the fullest rank of any micro-batch.
  int64_t max_tokens() const;
  /// Sums over the micro-batches of MicroBatchPlan::tokens_moved and MicroBatchPlan::attention_tokens_moved.
  int64_t tokens_moved() const { return sum_of(&MicroBatchPlan::tokens_moved); }
  double attention_tokens_moved() const { return sum_of(&MicroBatchPlan::attention_tokens_moved); }
  /// The part of all tokens that leaves its rank in each all-to-all of attention; 0 without tokens.
  double exchanged_fraction() const;

  /// Checks that each sequence is in exactly one micro-batch, that every plan is one of its micro-batch's sequences,
  /// and every plan (MicroBatchPlan::validate). Throws StateError with the first promise that is broken.
  void validate() const;

  bool operator==(const Plan&) const = default;

 private:
  template <class Value>
  Value sum_of(Value (MicroBatchPlan::*value)() const) const {
    Value sum = 0;
    for (const MicroBatchPlan& plan : plans()) sum += (plan.*value)();
    return sum;
  }

  StepInput input_;
  std::vector<int32_t> micro_batches_;
  std::vector<MicroBatchPlan> plans_;
};

}  // namespace knapformer
