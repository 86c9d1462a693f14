// Plans and predictions of many inputs, a hash a line: what `make same-plans` compares between compilers and options.
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

#include "knapformer/core/cost/plan_json.h"
#include "knapformer/core/model/data_mix.h"
#include "knapformer/core/planners/planner.h"
#include "knapformer/core/planners/whole_step/step_solver.h"

namespace {

using namespace knapformer;

/// FNV-1a, of JSON: this has the shortest text of each number that gives it back, so equal texts are equal bits.
uint64_t hash(std::string_view bytes) {
  uint64_t value = 0xcbf29ce484222325;
  for (const char byte : bytes) value = (value ^ static_cast<unsigned char>(byte)) * 0x100000001b3;
  return value;
}

PlanInput input_of(const char* mix, const char* topology, int64_t step) {
  PlanInput input;
  input.topology = Topology::parse(topology, 32);
  input.seq_lens = SequenceLengths::from_lists(DataMix::parse(mix).draw_lengths(7, step, 32));
  input.d_model = 3072;
  input.model.num_heads = 24;
  if (step == 1) {  // unequal ranks
    for (int32_t rank = 0; rank < 32; ++rank) input.rank_speed.push_back(1 + 0.01 * rank);
  }
  return input;
}

}  // namespace

int main() {
  for (const char* mix : {"low", "mixed", "joint"}) {
    for (const char* topology : {"g1n1", "g8n4", "g8/4/2/1n4", "g1n16+g4/2/1n4", "g32/16/8/4/2/1n1"}) {
      for (int64_t step = 0; step < 2; ++step) {
        for (const Planner& planner : planners()) {
          if (!planner.plans_nested_bags && std::string_view(topology).find('/') != std::string_view::npos) continue;
          const MicroBatchPlan plan = plan_micro_batch(input_of(mix, topology, step), planner.name, {.moves = 2000});
          std::printf("%016llx %s %s %s %d\n", static_cast<unsigned long long>(hash(plan_to_json(plan))),
                      std::string(planner.name).c_str(), mix, topology, static_cast<int>(step));
        }
      }
      const Plan step =
          plan_step({.sequences = input_of(mix, topology, 0), .num_micro_batches = 2}, "balanced", {.moves = 2000});
      std::printf("%016llx step %s %s\n", static_cast<unsigned long long>(hash(plan_to_json(step))), mix, topology);
    }
  }
}
