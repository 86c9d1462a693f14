#include <pybind11/stl.h>

#include <variant>

#include "knapformer/bindings/core_bindings.h"
#include "knapformer/bindings/effort.h"
#include "knapformer/core/error.h"
#include "knapformer/core/heads.h"
#include "knapformer/core/mask.h"
#include "knapformer/core/planner.h"
#include "knapformer/core/topology_choice.h"

namespace py = pybind11;
using namespace knapformer;  // NOLINT: this file is nothing but names of the core

namespace {

/// How many (query, key/value) heads each rank of a group computes.
std::vector<std::pair<size_t, size_t>> head_shares(int64_t num_heads, int64_t num_kv_heads, int32_t degree) {
  if (degree < 1) throw_argument("degree", degree, "at least 1");
  const HeadPartition heads = partition_heads(num_heads, num_kv_heads, degree);
  std::vector<std::pair<size_t, size_t>> counts;
  for (int32_t i = 0; i < degree; ++i) counts.emplace_back(heads.query.of(i).size(), heads.key_value.of(i).size());
  return counts;
}

using Masks = std::variant<std::string, std::vector<std::vector<std::string>>>;

/// One mask for all sequences, or one for each, in lists like the lengths'.
std::vector<int64_t> pairs_of(const Masks& masks, const SequenceLengths& seq_lens) {
  std::vector<int64_t> pairs;
  if (const auto* name = std::get_if<std::string>(&masks)) {
    const Mask mask = Mask::parse(*name);
    if (mask.kind == Mask::Kind::kFull) return pairs;
    for (const int64_t length : seq_lens.lens()) pairs.push_back(mask.pairs(length));
    return pairs;
  }
  const auto& lists = std::get<std::vector<std::vector<std::string>>>(masks);
  if (lists.size() != static_cast<size_t>(seq_lens.num_ranks())) {
    throw_argument("masks", text(lists.size(), " lists"),
                   text("a mask, or a list of masks for each of the ", seq_lens.num_ranks(), " ranks"));
  }
  for (size_t r = 0; r < lists.size(); ++r) {
    const auto lens = seq_lens.lens(Rank(r));
    if (lists[r].size() != lens.size()) {
      throw_argument("masks", text(lists[r].size(), " masks for rank ", r),
                     text("one for each of its ", lens.size(), " sequences"));
    }
    for (size_t i = 0; i < lens.size(); ++i) pairs.push_back(Mask::parse(lists[r][i]).pairs(lens[i]));
  }
  return pairs;
}

}  // namespace

void bind_planner(py::module_& m) {
  m.def(
      "plan",
      [](const std::vector<std::vector<int64_t>>& seq_lens, const std::string& topology, int64_t d_model, double gamma,
         const std::string& solver, double mask_factor, const std::variant<int64_t, std::string>& effort,
         const Masks& masks, int64_t max_tokens_per_rank, std::vector<double> rank_speed, const ClusterModel& cluster,
         int32_t num_heads) {
        PlanInput input{.seq_lens = SequenceLengths::from_lists(seq_lens),
                        .topology = {},
                        .d_model = d_model,
                        .workload = {.gamma = gamma, .mask_factor = mask_factor},
                        .cluster = cluster,
                        .rank_speed = std::move(rank_speed),
                        .max_tokens_per_rank = max_tokens_per_rank};
        input.attention_pairs = pairs_of(masks, input.seq_lens);
        const std::string chosen =
            topology == "auto"
                ? rank_topologies({&input, 1}, {.num_heads = num_heads, .solver = solver}).front().topology
                : topology;
        input.topology = Topology::parse(chosen, input.seq_lens.num_ranks());
        check_heads(input.topology, num_heads);
        return make_plan(std::move(input), solver, effort_of(effort));
      },
      py::arg("seq_lens_per_rank"), py::arg("topology"), py::arg("d_model"), py::arg("gamma") = 1.0,
      py::arg("solver") = "balanced", py::arg("mask_factor") = 1.0, py::arg("effort") = "default",
      py::arg("masks") = "full", py::arg("max_tokens_per_rank") = 0, py::arg("rank_speed") = std::vector<double>(),
      py::arg("cluster") = ClusterModel{}, py::arg("num_heads") = 0, py::call_guard<py::gil_scoped_release>(),
      "Plans the sequences of all ranks, without process groups.\n\n"
      "seq_lens_per_rank: for each rank the lengths of its sequences, in tokens. topology: its text, or 'auto' for the "
      "best of\n"
      "rank_topologies for these lengths. d_model: width, in features.\n"
      "solver: 'balanced' or 'greedy' (flat topologies only). effort (balanced): 'low', 'default', 'high', or a number "
      "of moves; the\n"
      "plan depends on it and not on the machine. masks: the mask of all sequences, or of each, in lists like the "
      "lengths'\n"
      "(see attention_pairs). max_tokens_per_rank: a limit that the plan keeps or that is refused, 0 for none. "
      "rank_speed: per rank,\n"
      "relative; none where all are equal. cluster: what times are predicted with. num_heads: only bags whose "
      "ranks divide\n"
      "them: 'auto' chooses among those, another topology is refused; 0 for any (the balancer shares heads unevenly "
      "too, which\n"
      "predicted times do not see).\n\n"
      "Raises ArgumentError, naming the argument. The same input gives the same plan, bit for bit, on any machine.");
  py::class_<TopologyOption>(m, "TopologyOption", "A topology and what it is predicted to do.")
      .def_readonly("topology", &TopologyOption::topology)
      .def_readonly("predicted_time", &TopologyOption::predicted_time_s,
                    "Seconds of one block, forward; mean over the batches.")
      .def_readonly("efficiency_loss", &TopologyOption::efficiency_loss, "Predicted over ideal time.")
      .def_readonly("crossing", &TopologyOption::crossing, "Share of the tokens that cross ranks in attention.")
      .def_readonly("max_tokens_over_mean", &TopologyOption::max_tokens_over_mean)
      .def_readonly("reason", &TopologyOption::reason)
      .def("__repr__", [](const TopologyOption& o) {
        return text("TopologyOption('", o.topology, "', predicted_time=", o.predicted_time_s, ", reason='", o.reason,
                    "')");
      });
  m.def(
      "rank_topologies",
      [](const std::vector<std::vector<std::vector<int64_t>>>& batches, int64_t d_model, double gamma,
         int32_t num_heads, const std::string& mask, int64_t max_tokens_per_rank, const std::vector<double>& rank_speed,
         const ClusterModel& cluster) {
        std::vector<PlanInput> inputs;
        for (const auto& batch : batches) {
          inputs.push_back({.seq_lens = SequenceLengths::from_lists(batch),
                            .topology = {},
                            .d_model = d_model,
                            .workload = {.gamma = gamma},
                            .cluster = cluster,
                            .rank_speed = rank_speed,
                            .max_tokens_per_rank = max_tokens_per_rank});
          inputs.back().attention_pairs = pairs_of(mask, inputs.back().seq_lens);
        }
        return rank_topologies(inputs, {.num_heads = num_heads});
      },
      py::arg("batches"), py::arg("d_model"), py::arg("gamma") = 1.0, py::arg("num_heads") = 0,
      py::arg("mask") = "full", py::arg("max_tokens_per_rank") = 0, py::arg("rank_speed") = std::vector<double>(),
      py::arg("cluster") = ClusterModel{}, py::call_guard<py::gil_scoped_release>(),
      "Topologies for a sample of batches (each: for each rank a list of lengths, in tokens), best predicted time "
      "first, with\n"
      "reasons: flat and nested bags of up to two of the cluster's nodes, planned by the balanced solver. num_heads: "
      "only bags whose\n"
      "ranks divide them; 0 for any. mask: of all sequences. The rest as in plan. Where max_tokens_per_rank cannot be "
      "kept a topology\n"
      "comes last, its predicted_time infinite.\n\n"
      "Raises ArgumentError.");
  m.def("head_shares", &head_shares, py::arg("num_heads"), py::arg("num_kv_heads"), py::arg("degree"),
        "For each of the `degree` ranks that share a sequence, how many query heads and how many key/value heads it "
        "computes.\n\n"
        "Raises ArgumentError where num_kv_heads does not divide num_heads, or a count is below 1.");
  m.def("solver_names", [] {
    std::vector<std::string> names(solver_names().begin(), solver_names().end());
    return names;
  });
}
