// libFuzzer on the functions that read input from anybody, and on the planner. KNAPFORMER_FUZZ in the environment names
// the function that gets the input. Any outcome but a result or an Error is a fault, and so is a result that breaks its
// promise.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "knapformer/core/cost/bounds.h"
#include "knapformer/core/cost/plan_json.h"
#include "knapformer/core/model/cluster.h"
#include "knapformer/core/model/data_mix.h"
#include "knapformer/core/model/mask.h"
#include "knapformer/core/model/topology.h"
#include "knapformer/core/planners/planner.h"
#include "knapformer/core/util/error.h"

namespace {

using namespace knapformer;  // NOLINT: this file is nothing but names of the core

void expect(bool promise) {
  if (!promise) std::abort();
}

/// Numbers from bytes; zeros behind their end.
class Bytes {
 public:
  explicit Bytes(std::string_view bytes) : bytes_(bytes) {}
  uint8_t byte() {
    if (bytes_.empty()) return 0;
    const auto first = static_cast<uint8_t>(bytes_.front());
    bytes_.remove_prefix(1);
    return first;
  }
  int64_t below(int64_t bound) { return (byte() << 8 | byte()) % bound; }
  bool at_end() const { return bytes_.empty(); }

 private:
  std::string_view bytes_;
};

void topology(std::string_view text) {
  const Topology once = Topology::parse(text);
  expect(Topology::parse(once.str()) == once);
  if (once.num_ranks() <= 1 << 10)
    expect(Topology::parse(text, 3 * once.num_ranks()).num_ranks() == 3 * once.num_ranks());
}

void data_mix(std::string_view text) {
  const DataMix mix = DataMix::parse(std::string(text));
  expect(DataMix::parse(mix.str()).str() == mix.str());
  int64_t num_samples = 0;
  for (const DataCode& code : mix.codes()) num_samples += int64_t{code.num_ranks} * code.batch_size;
  if (num_samples <= 1 << 16 || num_samples > 1 << 24) mix.draw_lengths(1, 2, mix.num_ranks());
}

void mask(std::string_view text) {
  const Mask mask = Mask::parse(text);
  expect(Mask::parse(mask.str()).str() == mask.str());
  for (const int64_t length : {int64_t{1}, int64_t{1000}, SequenceLengths::kMaxSequenceTokens}) {
    const int64_t pairs = mask.pairs(length);
    expect(pairs >= 0 && pairs <= length * length);
  }
}

void cluster(std::string_view name) { Cluster::named(std::string(name)); }

void plan_json(std::string_view text) {
  const Plan plan = plan_from_json(text);
  plan.validate();
  expect(plan_from_json(plan_to_json(plan)) == plan);
}

/// Any lengths and limits, in a few topologies: the plan is valid, keeps its limit, and is the same when made again.
void planner(std::string_view bytes) {
  static constexpr const char* kTopologies[] = {"g1n2",        "g2n2",       "g4/2/1n1",
                                                "g1n1+g2/1n1", "g8/4/2/1n1", "g3n1+g6/3/1n1"};
  Bytes in(bytes);
  PlanInput input;
  const Topology one = Topology::parse(kTopologies[in.below(std::size(kTopologies))]);
  input.topology = Topology::parse(one.str(), one.num_ranks() * (1 + in.below(2)));
  input.d_model = 1 + in.below(8192);
  input.max_tokens_per_rank = in.below(4) == 0 ? 1 + in.below(65536) : 0;
  if (in.below(4) == 0) {
    for (int32_t r = 0; r < input.topology.num_ranks(); ++r)
      input.rank_speed.push_back(static_cast<double>(1 + in.below(100)) / 50);
  }
  std::vector<std::vector<int64_t>> lengths(static_cast<size_t>(input.topology.num_ranks()));
  for (int32_t i = 0; i < 200 && !in.at_end(); ++i) {
    const int64_t length = 1 + (in.below(65536) << in.below(16));
    lengths[static_cast<size_t>(in.below(input.topology.num_ranks()))].push_back(length);
  }
  input.seq_lens = SequenceLengths::from_lists(lengths);
  const MicroBatchPlan plan = plan_micro_batch(input, "balanced", {.moves = Effort::kLow});
  plan.validate();
  expect(input.max_tokens_per_rank == 0 || plan.max_tokens() <= input.max_tokens_per_rank);
  expect(plan_micro_batch(input, "balanced", {.moves = Effort::kLow}) == plan);
}

using Target = void (*)(std::string_view);

Target target() {
  static constexpr std::pair<std::string_view, Target> kTargets[] = {{"topology", topology},   {"data_mix", data_mix},
                                                                     {"mask", mask},           {"cluster", cluster},
                                                                     {"plan_json", plan_json}, {"planner", planner}};
  const char* name = std::getenv("KNAPFORMER_FUZZ");
  for (const auto& [known, function] : kTargets)
    if (name != nullptr && known == name) return function;
  std::fputs("KNAPFORMER_FUZZ: expected the name of a target; they stand at the end of fuzz_core.cpp\n", stderr);
  std::exit(2);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Target run = target();
  try {
    run(std::string_view(reinterpret_cast<const char*>(data), size));
  } catch (const Error&) {  // what is promised for wrong input
  }
  return 0;
}
