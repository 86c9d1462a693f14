// Speed of the planners. Results in structured form: bench_planner --benchmark_format=json.
//
// The published implementation plans 32 ranks of the joint mix with g8n4 in 2 to 6 ms (measured on this project's
// development machine, in Python), and the lengths of balanced_b_1024_4k below, with g8n128, in 522 to 1,531 ms.
#include <benchmark/benchmark.h>

#include <string>
#include <vector>

#include "knapformer/core/cost/bounds.h"
#include "knapformer/core/model/data_mix.h"
#include "knapformer/core/planners/planner.h"
#include "knapformer/core/planners/whole_step/step_solver.h"

namespace knapformer {
namespace {

SequenceLengths joint(int32_t num_ranks) {
  return SequenceLengths::from_lists(DataMix::parse("joint").draw_lengths(0, 0, num_ranks));
}

/// `count` sequences a rank, each of a visual length drawn evenly from five, times U[0.96, 1.04], plus 0..392 text.
SequenceLengths five_lengths(int32_t num_ranks, int32_t count) {
  std::vector<DataMix> sources;
  for (const char* codes : {"g1b1i256f1s0", "g1b1i512f1s0", "g1b1i1024f1s0", "g1b1i2048f1s0", "g1b1i2560f1s0"}) {
    sources.push_back(DataMix::parse(codes));
  }
  std::vector<std::vector<int64_t>> lists(static_cast<size_t>(num_ranks));
  uint64_t state = 1;
  for (int32_t r = 0; r < num_ranks; ++r) {
    for (int32_t i = 0; i < count; ++i) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      const DataMix& source = sources[(state >> 33) % sources.size()];
      lists[static_cast<size_t>(r)].push_back(source.draw(0, i, Rank(r))[0].num_tokens());
    }
  }
  return SequenceLengths::from_lists(lists);
}

void plan(benchmark::State& state, const SequenceLengths& lens, const std::string& topology, std::string_view solver,
          Effort effort) {
  const PlanInput input{
      .seq_lens = lens, .topology = Topology::parse(topology, lens.num_ranks()), .d_model = 3072, .workload = {}};
  for (auto _ : state) benchmark::DoNotOptimize(plan_micro_batch(input, solver, effort));
  const MicroBatchPlan result = plan_micro_batch(input, solver, effort);
  state.counters["sequences"] = lens.num_sequences();
  state.counters["max_over_mean"] = result.balance_after().max_over_mean();
  state.counters["gap"] = prediction_of(result).gap();
}

void greedy_joint_32(benchmark::State& state) { plan(state, joint(32), "g8n4", "greedy", {}); }
void greedy_16384_262k(benchmark::State& state) { plan(state, five_lengths(16384, 16), "g8n2048", "greedy", {}); }
BENCHMARK(greedy_joint_32)->Unit(benchmark::kMicrosecond);
BENCHMARK(greedy_16384_262k)->Unit(benchmark::kMillisecond);

void balanced_joint_32(benchmark::State& state) {
  plan(state, joint(32), "g8/4/2/1n4", "balanced", {.moves = state.range(0)});
}
void balanced_b_1024_4k(benchmark::State& state) {
  plan(state, five_lengths(1024, 4), "g8/4/2/1n128", "balanced", {.moves = state.range(0)});
}
void balanced_1024_16k(benchmark::State& state) {
  plan(state, five_lengths(1024, 16), "g8/4/2/1n128", "balanced", {.moves = state.range(0)});
}
BENCHMARK(balanced_joint_32)
    ->Arg(Effort::kLow)
    ->Arg(Effort::kDefault)
    ->Arg(Effort::kHigh)
    ->Unit(benchmark::kMicrosecond);
BENCHMARK(balanced_b_1024_4k)->Arg(Effort::kLow)->Arg(Effort::kDefault)->Unit(benchmark::kMillisecond);
BENCHMARK(balanced_1024_16k)->Arg(Effort::kLow)->Arg(Effort::kDefault)->Unit(benchmark::kMillisecond);

/// A step of four micro-batches.
void plan_step_of(benchmark::State& state, const SequenceLengths& lens) {
  const StepInput input{.sequences = {.seq_lens = lens,
                                      .topology = Topology::parse("g8/4/2/1n1", lens.num_ranks()),
                                      .d_model = 3072,
                                      .workload = {}},
                        .num_micro_batches = 4};
  const Effort effort{.moves = state.range(0)};
  for (auto _ : state) benchmark::DoNotOptimize(plan_step(input, "balanced", effort));
  const Plan result = plan_step(input, "balanced", effort);
  state.counters["sequences"] = lens.num_sequences();
  state.counters["exchanged_fraction"] = result.exchanged_fraction();
  state.counters["gap"] = prediction_of(result).gap();
}
SequenceLengths four_batches() {
  std::vector<std::vector<int64_t>> lists(32);
  for (int32_t k = 0; k < 4; ++k) {
    const auto batch = DataMix::parse("joint").draw_lengths(0, k, 32);
    for (size_t r = 0; r < lists.size(); ++r) lists[r].insert(lists[r].end(), batch[r].begin(), batch[r].end());
  }
  return SequenceLengths::from_lists(lists);
}

void step_joint_32(benchmark::State& state) { plan_step_of(state, four_batches()); }
void step_1024_16k(benchmark::State& state) { plan_step_of(state, five_lengths(1024, 16)); }
void step_16384_262k(benchmark::State& state) { plan_step_of(state, five_lengths(16384, 16)); }
BENCHMARK(step_joint_32)->Arg(Effort::kLow)->Arg(Effort::kDefault)->Unit(benchmark::kMicrosecond);
BENCHMARK(step_1024_16k)->Arg(Effort::kLow)->Arg(Effort::kDefault)->Unit(benchmark::kMillisecond);
BENCHMARK(step_16384_262k)->Arg(Effort::kDefault)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace knapformer

BENCHMARK_MAIN();
