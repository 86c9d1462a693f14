#include "knapformer/core/plan/plan.h"

#include <algorithm>
#include <limits>

#include "knapformer/core/util/error.h"

namespace knapformer {

StepSync parse_step_sync(std::string_view name) {
  for (const StepSync sync : {StepSync::kMicroBatch, StepSync::kStep}) {
    if (step_sync_name(sync) == name) return sync;
  }
  throw_argument("sync", text("'", name, "'"), "'micro_batch' or 'step'");
}

std::string_view step_sync_name(StepSync sync) { return sync == StepSync::kStep ? "step" : "micro_batch"; }

void StepInput::validate() const {
  sequences.validate();
  if (num_micro_batches < 1 || num_micro_batches > kMaxMicroBatches)
    throw_argument("micro_batches", num_micro_batches, text("1 to ", kMaxMicroBatches));
}

PlanInput StepInput::all_at_once() const {
  PlanInput all = sequences;
  const int64_t max = std::numeric_limits<int64_t>::max() / num_micro_batches;
  all.max_tokens_per_rank = std::min(all.max_tokens_per_rank, max) * num_micro_batches;
  return all;
}

std::vector<PlanInput> micro_batch_inputs(const StepInput& input, std::span<const int32_t> micro_batches) {
  const PlanInput& step = input.sequences;
  KNAPFORMER_ASSERT(std::ssize(micro_batches) == step.seq_lens.num_sequences());
  const auto num_micro_batches = static_cast<size_t>(input.num_micro_batches);
  const std::vector<int64_t> none(static_cast<size_t>(step.seq_lens.num_ranks()));
  std::vector<PlanInput> inputs(num_micro_batches, step.without_sequences());
  std::vector<std::vector<int64_t>> lens(num_micro_batches), counts(num_micro_batches, none);
  for (size_t s = 0; s < micro_batches.size(); ++s) {
    const SequenceId id(s);
    const int32_t k = micro_batches[s];
    lens[k].push_back(step.seq_lens[id]);
    ++counts[k][step.seq_lens.home_of(id).index()];
    inputs[k].append_given(step, id);
  }
  for (size_t k = 0; k < num_micro_batches; ++k) inputs[k].seq_lens = SequenceLengths(std::move(lens[k]), counts[k]);
  return inputs;
}

std::vector<int32_t> micro_batches_as_given(const SequenceLengths& seq_lens, int32_t num_micro_batches) {
  std::vector<int32_t> micro_batches;
  micro_batches.reserve(seq_lens.lens().size());
  for (int32_t r = 0; r < seq_lens.num_ranks(); ++r) {
    const int32_t count = seq_lens.last_of(Rank(r)).value - seq_lens.first_of(Rank(r)).value;
    for (int32_t k = 0; k < num_micro_batches; ++k) {
      const int32_t size = count / num_micro_batches + (k < count % num_micro_batches ? 1 : 0);
      micro_batches.insert(micro_batches.end(), static_cast<size_t>(size), k);
    }
  }
  return micro_batches;
}

std::vector<MicroBatchPlan> plans_as_placed(const StepInput& input, std::span<const int32_t> micro_batches,
                                            std::span<const Placement> placements, std::span<const int64_t> chunk_lens,
                                            std::span<const std::string> solvers) {
  std::vector<PlanInput> inputs = micro_batch_inputs(input, micro_batches);
  std::vector<std::vector<Placement>> placements_of(inputs.size());
  std::vector<std::vector<int64_t>> chunk_lens_of(inputs.size());
  for (size_t s = 0; s < micro_batches.size(); ++s) {
    const auto k = static_cast<size_t>(micro_batches[s]);
    placements_of[k].push_back(placements[s]);
    const auto lens = chunk_lens.first(static_cast<size_t>(placements[s].degree));
    chunk_lens_of[k].insert(chunk_lens_of[k].end(), lens.begin(), lens.end());
    chunk_lens = chunk_lens.subspan(lens.size());
  }
  std::vector<MicroBatchPlan> plans;
  plans.reserve(inputs.size());
  for (size_t k = 0; k < inputs.size(); ++k)
    plans.emplace_back(std::move(inputs[k]), solvers[k], std::move(placements_of[k]), std::move(chunk_lens_of[k]));
  return plans;
}

Plan::Plan(StepInput input, std::vector<int32_t> micro_batches, std::vector<MicroBatchPlan> plans)
    : input_(std::move(input)), micro_batches_(std::move(micro_batches)), plans_(std::move(plans)) {
  if (input_.num_micro_batches == 1) input_.sync = StepSync::kMicroBatch;
  KNAPFORMER_ASSERT(std::ssize(micro_batches_) == input_.sequences.seq_lens.num_sequences());
  KNAPFORMER_ASSERT(std::ssize(plans_) == input_.num_micro_batches);
}

Plan::Plan(MicroBatchPlan plan) : input_{.sequences = plan.input()}, micro_batches_(plan.placements().size(), 0) {
  plans_.push_back(std::move(plan));
}

std::vector<SequenceId> Plan::sequences_of(int32_t micro_batch) const {
  std::vector<SequenceId> ids;
  for (size_t s = 0; s < micro_batches_.size(); ++s) {
    if (micro_batches_[s] == micro_batch) ids.push_back(SequenceId(s));
  }
  return ids;
}

std::vector<Chunk> Plan::chunks_on(Rank rank, int32_t micro_batch) const {
  const std::vector<SequenceId> ids = sequences_of(micro_batch);
  const MicroBatchPlan& plan = plans_[micro_batch];
  std::vector<Chunk> held;
  for (const int32_t index : plan.chunks_on(rank)) {
    held.push_back(plan.chunk(index));
    held.back().sequence = ids[held.back().sequence.index()];
  }
  return held;
}

std::vector<int32_t> Plan::home_sequences(Rank rank, int32_t micro_batch) const {
  const SequenceLengths& lengths = seq_lens();
  std::vector<int32_t> indices;
  for (SequenceId id = lengths.first_of(rank); id < lengths.last_of(rank); ++id.value) {
    if (micro_batches_[id.index()] == micro_batch) indices.push_back(id.value - lengths.first_of(rank).value);
  }
  return indices;
}

int64_t Plan::max_tokens() const {
  int64_t max = 0;
  for (const MicroBatchPlan& plan : plans()) max = std::max(max, plan.max_tokens());
  return max;
}

double Plan::exchanged_fraction() const {
  const int64_t tokens = num_tokens();
  return tokens > 0 ? attention_tokens_moved() / static_cast<double>(tokens) : 0;
}

void Plan::validate() const {
  for (size_t s = 0; s < micro_batches_.size(); ++s) {
    if (micro_batches_[s] < 0 || micro_batches_[s] >= num_micro_batches()) {
      throw StateError(
          text("sequence ", s, " is in micro-batch ", micro_batches_[s], ", expected 0 to ", num_micro_batches() - 1));
    }
  }
  const std::vector<PlanInput> inputs = micro_batch_inputs(input_, micro_batches_);
  for (size_t k = 0; k < inputs.size(); ++k) {
    if (plans_[k].input() != inputs[k])
      throw StateError(text("the plan of micro-batch ", k, " is not one of its sequences and settings"));
    plans_[k].validate();
  }
}

}  // namespace knapformer
