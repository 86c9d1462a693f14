// Steps to plan, and what tests ask of their plans.
#pragma once

#include <cstdint>

#include "knapformer/core/cost/step_time.h"
#include "knapformer/core/planners/whole_step/step_solver.h"
#include "tests/core/cases.h"
#include "tests/core/mixes.h"

namespace knapformer {

constexpr int64_t kNoLimit = int64_t{1} << 40;

inline double time_s(const Plan& plan) { return predict_step(plan).total_s; }

inline StepInput random_step(Cases& cases, int i) {
  StepInput input{.sequences = cases.input(i % 2 == 0, i % 3 == 0 ? 3000 : 60),
                  .num_micro_batches = static_cast<int32_t>(cases.integer(1, 5)),
                  .sync = i % 5 == 0 ? StepSync::kStep : StepSync::kMicroBatch};
  if (i % 7 == 0) input.sequences.rank_speed = cases.rank_speed(input.sequences.topology.num_ranks());
  if (i % 4 == 0) {
    input.sequences.cluster.fixed_s = 0.01;
    input.sequences.model.num_parameters = 1e8;
  }
  if (i % 6 == 0) input.sequences.give_mask(Mask::parse("causal"));
  return input;
}

inline StepInput default_step(std::vector<std::vector<int64_t>> lens, std::string_view topology,
                              int32_t num_micro_batches, int64_t limit = 0) {
  StepInput input{.sequences = lengths_in(lens, topology, 3072), .num_micro_batches = num_micro_batches};
  input.sequences.max_tokens_per_rank = limit;
  return input;
}

/// `num_micro_batches` consecutive batches of a mix over 32 ranks, on the block clock.
inline StepInput step_of_mix(const char* mix, uint64_t seed, double gamma, int32_t num_micro_batches) {
  StepInput input{.sequences = mix_input(mix, "g8/4/2/1n4", seed, gamma), .num_micro_batches = num_micro_batches};
  std::vector<std::vector<int64_t>> lens(32);
  for (int32_t k = 0; k < num_micro_batches; ++k) {
    const auto batch = DataMix::parse(mix).draw_lengths(seed, k, 32);
    for (size_t r = 0; r < lens.size(); ++r) lens[r].insert(lens[r].end(), batch[r].begin(), batch[r].end());
  }
  input.sequences.seq_lens = SequenceLengths::from_lists(lens);
  return input;
}

}  // namespace knapformer
