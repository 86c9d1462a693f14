// Batches of lengths such as training draws.
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <random>
#include <vector>

#include "knapformer/core/model/data_mix.h"
#include "knapformer/core/plan/micro_batch_plan.h"

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

/// Over the work divided evenly, what micro-batches take one after another on the block clock in nested bags inside a
/// node. Reckoned anew from the chunks, bulk-synchronously: every phase of a group ends when it ends for its slowest
/// rank, and the slowest group ends the micro-batch. Stricter than cost/step_time.h, and equal for what is cut evenly.
double strict_loss(const auto& plans) {
  double total = 0, even = 0;
  for (const MicroBatchPlan& plan : plans) {
    const auto num_ranks = static_cast<size_t>(plan.num_ranks());
    const double d = static_cast<double>(plan.input().d_model), gamma = plan.input().workload.gamma;
    std::vector<double> token(num_ranks), attention(num_ranks), exchange(num_ranks);
    std::vector<size_t> group(num_ranks);
    std::iota(group.begin(), group.end(), size_t{0});
    for (const Chunk& chunk : plan.chunks()) {
      const Placement& place = plan.placement(chunk.sequence);
      const auto n = static_cast<double>(chunk.num_tokens), l = static_cast<double>(plan.seq_lens()[chunk.sequence]);
      const size_t r = chunk.rank.index(), from = group[r], to = group[place.first_rank.index()];
      const double of_attention = gamma * 4 * l * l * d / place.degree;
      token[r] += 24 * n * d * d;
      attention[r] += of_attention;
      exchange[r] += 4 * n * d * 2 * (place.degree - 1) / place.degree / 200e9 * 400e12;
      even += (24 * n * d * d + of_attention) / static_cast<double>(num_ranks);
      std::ranges::replace(group, from, to);
    }
    std::map<size_t, std::array<double, 3>> longest;  // by group
    double slowest = 0;
    for (size_t r = 0; r < num_ranks; ++r) {
      auto& [tokens, pairs, sent] = longest[group[r]];
      tokens = std::max(tokens, token[r]);
      pairs = std::max(pairs, attention[r]);
      sent = std::max(sent, exchange[r]);
      slowest = std::max(slowest, tokens + pairs + sent);
    }
    total += slowest;
  }
  return total / even;
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
