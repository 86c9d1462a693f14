#include "knapformer/torch/balancer_options.h"

#include <charconv>
#include <vector>

#include "knapformer/core/util/error.h"

namespace knapformer {
namespace {

/// Changes with what ranks say to each other: ranks of different versions do not work together.
constexpr int32_t kProtocolVersion = 6;

/// Of the shortest text that reads back as the same number.
std::string exact_text(double value) {
  char buffer[32];
  const auto [end, error] = std::to_chars(buffer, buffer + sizeof(buffer), value);
  KNAPFORMER_ASSERT(error == std::errc());
  return {buffer, end};
}

template <class T>
void add_setting(Fingerprint& fingerprint, const std::string& name, const T& value) {
  if constexpr (IsRecord<T>) {
    for_each_field<T>([&](const auto& f) { add_setting(fingerprint, name + "." + f.name, value.*f.member); });
  } else if constexpr (std::is_same_v<T, StepMode>) {
    fingerprint.add(name, step_mode_name(value));
  } else if constexpr (std::is_arithmetic_v<T>) {
    fingerprint.add(name, exact_text(static_cast<double>(value)));
  } else {  // a list of numbers
    std::string numbers;
    for (const double number : value) numbers += exact_text(number) + ' ';
    fingerprint.add(name, numbers);
  }
}

}  // namespace

Fingerprint fingerprint_of(const BalancerOptions& options, const Topology& topology, std::string_view named) {
  PlanInput empty = options.plan;
  empty.seq_lens = SequenceLengths::from_lists(std::vector<std::vector<int64_t>>(topology.num_ranks()));
  empty.topology = topology;
  empty.d_model = 1;
  static_cast<void>(make_plan(std::move(empty), options.solver, options.effort));  // checks the options
  Fingerprint fingerprint("SequenceBalancer");
  fingerprint.add("version", std::to_string(kProtocolVersion));
  fingerprint.add("topology", named == kAutoTopology ? std::string(named) : topology.str());
  PlanInput::for_each_setting(options.plan,
                              [&](const char* name, const auto& value) { add_setting(fingerprint, name, value); });
  fingerprint.add("solver", options.solver);
  fingerprint.add("effort", options.effort.str());
  fingerprint.add("mask", options.mask.str());
  fingerprint.add("sync", step_sync_name(options.sync));
  return fingerprint;
}

}  // namespace knapformer
