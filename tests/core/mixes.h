// Batches of lengths such as training draws.
#pragma once

#include <random>
#include <vector>

#include "knapformer/core/model/data_mix.h"
#include "knapformer/core/plan/plan.h"

namespace knapformer {

/// A clock of round figures that sees one block's forward pass: 400 TFLOP/s, 200 GB/s inside a node and 25 between, no
/// latency, nothing hidden.
inline void use_block_clock(PlanInput& in) {
  in.cluster = {.flops_per_s = 400e12,
                .ranks_per_node = 8,
                .node_bytes_per_s = 200e9,
                .network_bytes_per_s = 25e9,
                .node_latency_s = 0,
                .network_latency_s = 0,
                .fixed_s = 0,
                .overlaps_attention = false};
  in.model = {.num_parameters = 0, .mode = StepMode::kInference};
}

/// The first step of a named mix over 32 ranks, on the block clock.
inline PlanInput mix_input(const char* mix, const char* topology, uint64_t seed, double gamma) {
  PlanInput in;
  in.seq_lens = SequenceLengths::from_lists(DataMix::parse(mix).draw_lengths(seed, 0, 32));
  in.topology = Topology::parse(topology, 32);
  in.d_model = 3072;
  in.workload.gamma = gamma;
  use_block_clock(in);
  return in;
}

/// `per_rank` sequences for each rank: one of five lengths, times U[0.96, 1.04], plus up to 392 tokens of text.
inline SequenceLengths five_lengths(uint64_t seed, int32_t num_ranks, int32_t per_rank) {
  std::mt19937_64 random(seed);
  std::vector<std::vector<int64_t>> lens(static_cast<size_t>(num_ranks));
  constexpr double kVisual[] = {256, 1024, 4096, 16384, 25600};
  const auto uniform = [&] { return static_cast<double>(random() >> 11) * 0x1p-53; };
  for (auto& list : lens) {
    for (int32_t i = 0; i < per_rank; ++i) {
      const double visual = kVisual[random() % 5] * (0.96 + 0.08 * uniform());
      list.push_back(static_cast<int64_t>(visual) + static_cast<int64_t>(random() % 393));
    }
  }
  return SequenceLengths::from_lists(lens);
}

}  // namespace knapformer
