// knapformer._core: the planner for Python, without torch. Conversion only.
#include <pybind11/operators.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <variant>

#include "knapformer/bindings/bind_step_time.h"
#include "knapformer/bindings/effort.h"
#include "knapformer/core/data_mix.h"
#include "knapformer/core/error.h"
#include "knapformer/core/heads.h"
#include "knapformer/core/mask.h"
#include "knapformer/core/plan_json.h"
#include "knapformer/core/planner.h"
#include "knapformer/core/topology_choice.h"

namespace py = pybind11;
using namespace knapformer;  // NOLINT: this file is nothing but names of the core

namespace {

template <class T>
std::vector<T> to_list(std::span<const T> values) {
  return {values.begin(), values.end()};
}

std::vector<std::vector<int64_t>> chunk_lens(const Plan& plan) {
  std::vector<std::vector<int64_t>> lens(static_cast<size_t>(plan.num_ranks()));
  for (int32_t r = 0; r < plan.num_ranks(); ++r) {
    for (const int32_t index : plan.chunks_on(Rank(r)))
      lens[static_cast<size_t>(r)].push_back(plan.chunk(index).num_tokens);
  }
  return lens;
}

std::vector<std::vector<int32_t>> sequences_on(const Plan& plan) {
  std::vector<std::vector<int32_t>> ids(static_cast<size_t>(plan.num_ranks()));
  for (int32_t r = 0; r < plan.num_ranks(); ++r) {
    for (const int32_t index : plan.chunks_on(Rank(r)))
      ids[static_cast<size_t>(r)].push_back(plan.chunk(index).sequence.value);
  }
  return ids;
}

py::list chunks(const Plan& plan) {
  py::list out(plan.chunks().size());
  for (size_t i = 0; i < plan.chunks().size(); ++i) {
    const Chunk& c = plan.chunks()[i];
    out[i] = py::make_tuple(c.sequence.value, c.rank.value, c.first_token, c.num_tokens);
  }
  return out;
}

template <class Field>
auto per_sequence(Field field) {
  return [field](const Plan& plan) {
    std::vector<int32_t> out;
    out.reserve(plan.placements().size());
    for (const Placement& p : plan.placements()) out.push_back(field(p));
    return out;
  };
}

std::string describe(const Plan& plan) {
  return text("Plan(topology='", plan.topology().str(), "', solver='", plan.solver(), "', num_ranks=", plan.num_ranks(),
              ", num_sequences=", plan.num_sequences(), ", num_tokens=", plan.num_tokens(),
              ", wir_before=", plan.balance_before().wir(), ", wir_after=", plan.balance_after().wir(), ")");
}

void bind_errors(py::module_& m) {
  static const py::exception<ArgumentError> argument_error(m, "ArgumentError", PyExc_ValueError);
  static const py::exception<StateError> state_error(m, "StateError", PyExc_RuntimeError);
  argument_error.attr("__doc__") = "An argument is wrong: the message names it, what came and what was expected.";
  state_error.attr("__doc__") = "A call came out of order, or ranks disagree.";
  // Global: the torch module throws the same errors.
  py::register_exception_translator([](std::exception_ptr pending) {
    try {
      if (pending) std::rethrow_exception(pending);
    } catch (const ArgumentError& error) {
      py::set_error(argument_error, error.what());
    } catch (const StateError& error) {
      py::set_error(state_error, error.what());
    }
  });
}

void bind_workload(py::module_& m) {
  py::class_<WorkloadModel>(m, "WorkloadModel",
                            "FLOPs of one transformer block: 24 l d^2 + gamma * mask_factor * 4 l^2 d.")
      .def(py::init([](double gamma, double mask_factor) {
             const WorkloadModel model{.gamma = gamma, .mask_factor = mask_factor};
             model.validate();
             return model;
           }),
           py::arg("gamma") = 1.0, py::arg("mask_factor") = 1.0)
      .def_readonly("gamma", &WorkloadModel::gamma)
      .def_readonly("mask_factor", &WorkloadModel::mask_factor)
      .def("work", &WorkloadModel::work, py::arg("seq_len"), py::arg("d_model"), "FLOPs of a whole sequence, forward.")
      .def(py::self == py::self)
      .def("__repr__", [](const WorkloadModel& w) {
        return text("WorkloadModel(gamma=", w.gamma, ", mask_factor=", w.mask_factor, ")");
      });

  py::class_<WorkloadFit>(m, "WorkloadFit", "k and gamma of t = k (24 l d^2 + gamma 4 l^2 d), fitted by least squares.")
      .def_readonly("seconds_per_flop", &WorkloadFit::seconds_per_flop, "k, in seconds per FLOP.")
      .def_readonly("gamma", &WorkloadFit::gamma)
      .def_readonly("relative_rms_error", &WorkloadFit::relative_rms_error)
      .def_readonly("relative_rms_error_without_gamma", &WorkloadFit::relative_rms_error_without_gamma)
      .def("__repr__", [](const WorkloadFit& f) {
        return text("WorkloadFit(seconds_per_flop=", f.seconds_per_flop, ", gamma=", f.gamma,
                    ", relative_rms_error=", f.relative_rms_error, ")");
      });
  m.def(
      "fit_workload",
      [](const std::vector<int64_t>& seq_lens, const std::vector<double>& latencies_s, int64_t d_model) {
        return fit_workload(seq_lens, latencies_s, d_model);
      },
      py::arg("seq_lens"), py::arg("latencies_s"), py::arg("d_model"),
      "Fits k and gamma to measured latencies (seconds) of one block at these lengths (tokens), by least squares.\n\n"
      "Raises ArgumentError for fewer than two distinct lengths or latencies that are not positive and finite, "
      "StateError where the\n"
      "best k is not positive.");
}

void bind_topology(py::module_& m) {
  py::class_<Topology>(m, "Topology", "Ranks cut into bags, written like 'g1n2+g2n1+g4n1' (nested bags: 'g8/4/2/1n4').")
      .def(py::init([](const std::string& text_form, std::optional<int64_t> num_ranks) {
             return num_ranks ? Topology::parse(text_form, *num_ranks) : Topology::parse(text_form);
           }),
           py::arg("text"), py::arg("num_ranks") = py::none(),
           "Parses one replica, repeated over `num_ranks` ranks where given. Raises ArgumentError.")
      .def_property_readonly("num_ranks", &Topology::num_ranks)
      .def_property_readonly("num_replicas", &Topology::num_replicas)
      .def_property_readonly("num_ranks_per_replica", &Topology::num_ranks_per_replica)
      .def_property_readonly("is_flat", &Topology::is_flat)
      .def_property_readonly(
          "bags",
          [](const Topology& t) {
            std::vector<std::vector<int32_t>> bags;
            for (const Bag& bag : t.bags()) {
              auto& ranks = bags.emplace_back();
              for (int32_t i = 0; i < bag.num_ranks; ++i) ranks.push_back(bag.first_rank.value + i);
            }
            return bags;
          },
          "The ranks of each bag, of all replicas.")
      .def(
          "bag_of",
          [](const Topology& t, int64_t rank) {
            if (rank < 0 || rank >= t.num_ranks()) throw_argument("rank", rank, text("0 to ", t.num_ranks() - 1));
            return t.bag_of(Rank(rank)).value;
          },
          py::arg("rank"))
      .def(py::self == py::self)
      .def("__str__", &Topology::str)
      .def("__repr__",
           [](const Topology& t) { return text("Topology('", t.str(), "', num_ranks=", t.num_ranks(), ")"); });
}

void bind_cluster(py::module_& m) {
  py::class_<ClusterModel>(m, "ClusterModel",
                           "What the balanced solver predicts times with. See knapformer/core/cluster.h.")
      .def(py::init([](double flops_per_s, double node_bytes_per_s, double network_bytes_per_s, double bytes_per_number,
                       int32_t ranks_per_node) {
             const ClusterModel model{.flops_per_s = flops_per_s,
                                      .node_bytes_per_s = node_bytes_per_s,
                                      .network_bytes_per_s = network_bytes_per_s,
                                      .bytes_per_number = bytes_per_number,
                                      .ranks_per_node = ranks_per_node};
             model.validate();
             return model;
           }),
           py::arg("flops_per_s") = ClusterModel{}.flops_per_s,
           py::arg("node_bytes_per_s") = ClusterModel{}.node_bytes_per_s,
           py::arg("network_bytes_per_s") = ClusterModel{}.network_bytes_per_s,
           py::arg("bytes_per_number") = ClusterModel{}.bytes_per_number,
           py::arg("ranks_per_node") = ClusterModel{}.ranks_per_node)
      .def_readonly("flops_per_s", &ClusterModel::flops_per_s, "Sustained, by a rank of speed 1.")
      .def_readonly("node_bytes_per_s", &ClusterModel::node_bytes_per_s, "A rank's bandwidth to ranks of its node.")
      .def_readonly("network_bytes_per_s", &ClusterModel::network_bytes_per_s,
                    "A rank's bandwidth to ranks of other nodes.")
      .def_readonly("bytes_per_number", &ClusterModel::bytes_per_number)
      .def_readonly("ranks_per_node", &ClusterModel::ranks_per_node)
      .def(py::self == py::self)
      .def("__repr__", [](const ClusterModel& c) {
        return text("ClusterModel(flops_per_s=", c.flops_per_s, ", node_bytes_per_s=", c.node_bytes_per_s,
                    ", network_bytes_per_s=", c.network_bytes_per_s, ", bytes_per_number=", c.bytes_per_number,
                    ", ranks_per_node=", c.ranks_per_node, ")");
      });
  m.def(
      "attention_pairs",
      [](const std::string& mask, int64_t seq_len) {
        if (seq_len < 1 || seq_len > SequenceLengths::kMaxSequenceTokens) {
          throw_argument("seq_len", seq_len, text("1 to ", SequenceLengths::kMaxSequenceTokens, " tokens"));
        }
        return Mask::parse(mask).pairs(seq_len);
      },
      py::arg("mask"), py::arg("seq_len"),
      "(query, key) pairs that a mask leaves of a sequence: 'full', 'causal', 'prefix:TEXT', "
      "'block_causal:TEXT:FRAME',\n"
      "'window:LEFT:RIGHT'. Raises ArgumentError.");
}

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

void bind_plan(py::module_& m) {
  py::class_<Plan>(m, "Plan",
                   "Which ranks hold which tokens of every sequence. Constant; equal inputs give equal plans.")
      .def_property_readonly("topology", &Plan::topology)
      .def_property_readonly("workload", [](const Plan& p) { return p.input().workload; })
      .def_property_readonly("d_model", [](const Plan& p) { return p.input().d_model; })
      .def_property_readonly("solver", &Plan::solver)
      .def_property_readonly("num_ranks", &Plan::num_ranks)
      .def_property_readonly("num_sequences", &Plan::num_sequences)
      .def_property_readonly("num_tokens", &Plan::num_tokens)
      .def_property_readonly(
          "seq_lens",
          [](const Plan& p) {
            std::vector<std::vector<int64_t>> lens;
            for (int32_t r = 0; r < p.num_ranks(); ++r) lens.push_back(to_list(p.seq_lens().lens(Rank(r))));
            return lens;
          },
          "Per home rank, the lengths of its sequences, in tokens.")
      .def_property_readonly("bag_of_sequence", per_sequence([](const Placement& p) { return p.bag.value; }))
      .def_property_readonly("first_rank_of_sequence",
                             per_sequence([](const Placement& p) { return p.first_rank.value; }))
      .def_property_readonly("degree_of_sequence", per_sequence([](const Placement& p) { return p.degree; }),
                             "How many consecutive ranks share each sequence.")
      .def_property_readonly("chunk_lens", &chunk_lens,
                             "Per rank, the tokens of the chunks that it holds, in row order.")
      .def_property_readonly("sequences_on", &sequences_on,
                             "Per rank, the sequence of each of its chunks, in row order.")
      .def_property_readonly("chunks", &chunks, "Tuples (sequence, rank, first token, tokens), in sequence order.")
      .def_property_readonly(
          "workload_before", [](const Plan& p) { return to_list(p.workload_before()); },
          "Per rank, FLOPs of one block forward where every sequence stays at home.")
      .def_property_readonly(
          "workload_after", [](const Plan& p) { return to_list(p.workload_after()); },
          "Per rank, FLOPs of one block forward under the plan.")
      .def_property_readonly("tokens_before", [](const Plan& p) { return to_list(p.tokens_before()); })
      .def_property_readonly("tokens_after", [](const Plan& p) { return to_list(p.tokens_after()); })
      .def_property_readonly(
          "wir_before", [](const Plan& p) { return p.balance_before().wir(); },
          "Highest over lowest workload of a rank; infinite where a rank has none.")
      .def_property_readonly("wir_after", [](const Plan& p) { return p.balance_after().wir(); })
      .def_property_readonly("max_over_mean_before", [](const Plan& p) { return p.balance_before().max_over_mean(); })
      .def_property_readonly("max_over_mean_after", [](const Plan& p) { return p.balance_after().max_over_mean(); })
      .def_property_readonly("tokens_moved", &Plan::tokens_moved, "Tokens held by another rank than their home.")
      .def_property_readonly("attention_tokens_moved", &Plan::attention_tokens_moved,
                             "Tokens that cross ranks in each all-to-all of an attention.")
      .def_property_readonly("predicted_time", &Plan::predicted_time_s, "Predicted seconds of one block, forward.")
      .def_property_readonly("lower_bound", &Plan::lower_bound_s,
                             "No plan of these sequences and this topology takes fewer seconds.")
      .def_property_readonly("gap", &Plan::gap,
                             "predicted_time / lower_bound - 1: how far from the best this plan may be.")
      .def_property_readonly(
          "ideal_time", [](const Plan& p) { return predict_block_time(p).ideal_s; },
          "Seconds of one block, forward, with the work spread evenly and no exchange.")
      .def_property_readonly("max_tokens", &Plan::max_tokens, "Tokens of the fullest rank.")
      .def_property_readonly("cluster", [](const Plan& p) { return p.input().cluster; })
      .def_property_readonly(
          "attention_pairs", [](const Plan& p) { return p.input().attention_pairs; },
          "Of each sequence the (query, key) pairs that its mask leaves. Empty: full attention everywhere.")
      .def("validate", &Plan::validate, "Checks every promise of a plan; raises StateError with the first one broken.")
      .def("to_json", &plan_to_json)
      .def_static(
          "from_json", [](const std::string& json) { return plan_from_json(json); }, py::arg("json"))
      .def(py::self == py::self)
      .def(py::pickle([](const Plan& p) { return py::str(plan_to_json(p)); },
                      [](const py::str& s) { return plan_from_json(s.cast<std::string>()); }))
      .def("__repr__", &describe);

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
      "relative; none where all are equal. cluster: what times are predicted with. num_heads: with 'auto', only bags "
      "whose ranks\n"
      "divide them; 0 for any.\n\n"
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

void bind_data_mix(py::module_& m) {
  py::class_<Sample>(m, "Sample")
      .def_readonly("text_tokens", &Sample::text_tokens)
      .def_readonly("visual_tokens", &Sample::visual_tokens)
      .def_property_readonly("num_tokens", &Sample::num_tokens)
      .def("__repr__", [](const Sample& s) {
        return text("Sample(text_tokens=", s.text_tokens, ", visual_tokens=", s.visual_tokens, ")");
      });
  py::class_<DataMix>(m, "DataMix", "Seeded sequence lengths from data codes, reproducible on any machine.")
      .def_static("parse", &DataMix::parse, py::arg("text"), py::arg("resolution_scale") = 1.0,
                  py::arg("max_text_tokens") = DataMix::kMaxTextTokens,
                  "Data codes such as 'g8b4i256f1s0,g4b1i2048f1s0', or 'low', 'mixed', 'joint'. Raises ArgumentError.")
      .def_static("names", [] { return std::vector<std::string>(DataMix::names().begin(), DataMix::names().end()); })
      .def_property_readonly("num_ranks", &DataMix::num_ranks)
      .def("check_divides", &DataMix::check_divides, py::arg("num_ranks"),
           "Raises ArgumentError where the mix does not divide them.")
      .def(
          "draw",
          [](const DataMix& mix, uint64_t seed, int64_t step, int64_t rank) {
            return mix.draw(seed, step, Rank(rank));
          },
          py::arg("seed"), py::arg("step"), py::arg("rank"), "The samples that a rank draws in a step.")
      .def("draw_lengths", &DataMix::draw_lengths, py::arg("seed"), py::arg("step"), py::arg("num_ranks"),
           "Per rank, the lengths of its samples in a step, in tokens.")
      .def("__str__", &DataMix::str)
      .def("__repr__", [](const DataMix& mix) { return text("DataMix('", mix.str(), "')"); });
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "The planner: what is decided. Needs no torch.";
  bind_errors(m);
  bind_workload(m);
  bind_topology(m);
  bind_cluster(m);
  bind_plan(m);
  bind_data_mix(m);
  bind_step_time(m);
}
