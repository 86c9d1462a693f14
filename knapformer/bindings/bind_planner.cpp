#include <pybind11/stl.h>

#include "knapformer/bindings/arguments.h"
#include "knapformer/bindings/core_bindings.h"
#include "knapformer/core/model/mask.h"
#include "knapformer/core/plan/heads.h"
#include "knapformer/core/planners/planner.h"
#include "knapformer/core/planners/topology_choice.h"
#include "knapformer/core/planners/whole_step/micro_batches.h"
#include "knapformer/core/util/error.h"

namespace py = pybind11;
using namespace knapformer;  // NOLINT: this file is nothing but names of the core

namespace {

using GivenLengths = Given<"collections.abc.Iterable[collections.abc.Iterable[typing.SupportsIndex]]">;
using GivenBatches =
    Given<"collections.abc.Iterable[collections.abc.Iterable[collections.abc.Iterable[typing.SupportsIndex]]]">;
using GivenMicroBatches = Given<"int | str">;
using GivenWork = Given<"collections.abc.Iterable[collections.abc.Iterable[typing.SupportsFloat]] | None">;
using GivenBatchWork =
    Given<"collections.abc.Iterable[collections.abc.Iterable[collections.abc.Iterable[typing.SupportsFloat]]] | None">;
using GivenMasks = Given<"str | collections.abc.Iterable[collections.abc.Iterable[str]]">;

/// How many (query, key/value) heads each rank of a group computes.
std::vector<std::pair<size_t, size_t>> head_shares(int64_t num_heads, int64_t num_kv_heads, int32_t degree) {
  if (degree < 1) throw_argument("degree", degree, "at least 1");
  const HeadPartition heads = partition_heads(num_heads, num_kv_heads, degree);
  std::vector<std::pair<size_t, size_t>> counts;
  for (int32_t i = 0; i < degree; ++i) counts.emplace_back(heads.query.of(i).size(), heads.key_value.of(i).size());
  return counts;
}

/// One mask for all sequences, or one for each, in lists like the lengths'.
std::vector<int64_t> pairs_from(const py::object& masks, const SequenceLengths& seq_lens) {
  constexpr const char* kExpected = "a mask, or for each rank a list of masks";
  std::vector<int64_t> pairs;
  if (const std::optional<std::string> name = as_text(masks)) {
    const Mask mask = Mask::parse(*name);
    if (mask.kind == Mask::Kind::kFull) return pairs;
    for (const int64_t length : seq_lens.lens()) pairs.push_back(mask.pairs(length));
    return pairs;
  }
  std::vector<std::vector<std::string>> lists;
  for_each_item(masks, "masks", kExpected, [&](py::handle list) {
    lists.push_back(list_from<std::string>(list, text("masks[", lists.size(), "]"), "a list of masks",
                                           "the text of a mask", as_text));
  });
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

/// For each rank a list of numbers, like the lengths'.
std::vector<double> work_from(const py::object& lists, const SequenceLengths& seq_lens) {
  std::vector<double> work;
  int32_t num_lists = 0;
  for_each_item(lists, "work", "None, or for each rank a list of numbers", [&](py::handle list) {
    const std::vector<double> of_rank = numbers_from(list, text("work[", num_lists, "]"));
    if (num_lists < seq_lens.num_ranks() && of_rank.size() != seq_lens.lens(Rank(num_lists)).size()) {
      throw_argument("work", text(of_rank.size(), " numbers for rank ", num_lists),
                     text("one for each of its ", seq_lens.lens(Rank(num_lists)).size(), " sequences"));
    }
    work.insert(work.end(), of_rank.begin(), of_rank.end());
    ++num_lists;
  });
  if (num_lists != seq_lens.num_ranks())
    throw_argument("work", text(num_lists, " lists"), text("one for each of the ", seq_lens.num_ranks(), " ranks"));
  return work;
}

/// Takes for each batch, for each rank a list of numbers.
void give_work(std::vector<PlanInput>& batches, const py::object& lists) {
  size_t num_lists = 0;
  for_each_item(lists, "work", "None, or a list like batches, of numbers", [&](py::handle of_batch) {
    if (num_lists < batches.size()) {
      PlanInput& input = batches[num_lists];
      input.give_work(work_from(py::reinterpret_borrow<py::object>(of_batch), input.seq_lens));
    }
    ++num_lists;
  });
  if (num_lists != batches.size())
    throw_argument("work", text(num_lists, " lists"), text("one for each of the ", batches.size(), " batches"));
}

PlanInput sequences_from(const GivenLengths& seq_lens_per_rank, const GivenInteger& d_model, const GivenMasks& masks,
                         const GivenWork& work, PlanInput settings) {
  settings.d_model = integer_from(d_model, "d_model");
  settings.seq_lens = SequenceLengths::from_lists(lengths_per_rank_from(seq_lens_per_rank, "seq_lens_per_rank"));
  settings.attention_pairs = pairs_from(masks, settings.seq_lens);
  if (!work.is_none()) {
    settings.give_work(work_from(work, settings.seq_lens));
  }
  return settings;
}

/// `fewest`: the number of micro-batches is chosen, too.
void choose_topology(StepInput& input, const std::string& chosen, const std::string& solver, bool fewest) {
  input.sequences.topology = Topology::parse(chosen == "auto" ? best_topology(input, solver, fewest) : chosen,
                                             input.sequences.seq_lens.num_ranks());
}

}  // namespace

void bind_planner(py::module_& m) {
  m.def(
      "plan",
      [](const GivenLengths& seq_lens_per_rank, const GivenText& topology, const GivenInteger& d_model,
         const GivenNumber& gamma, const GivenText& solver, const GivenEffort& effort, const GivenMasks& masks,
         const GivenInteger& max_tokens_per_rank, const GivenNumbers& rank_speed, const GivenCluster& cluster,
         const GivenInteger& num_heads, const GivenModel& model, const GivenWork& work) {
        StepInput step{.sequences = sequences_from(
                           seq_lens_per_rank, d_model, masks, work,
                           settings_from(gamma, num_heads, max_tokens_per_rank, rank_speed, cluster, model))};
        const std::string solver_name = text_from(solver, "solver"), chosen = text_from(topology, "topology");
        const Effort moves = effort_from(effort);
        const py::gil_scoped_release release;
        choose_topology(step, chosen, solver_name, /*fewest=*/false);
        return make_plan(std::move(step.sequences), solver_name, moves);
      },
      py::arg("seq_lens_per_rank"), py::arg("topology"), py::arg("d_model"), py::arg("gamma") = kDefaultGamma,
      py::arg("solver") = planners().front().name, py::arg("effort") = "default", py::arg("masks") = "full",
      py::arg("max_tokens_per_rank") = 0, py::arg("rank_speed") = py::tuple(), py::arg("cluster") = py::none(),
      py::arg("num_heads") = 0, py::arg("model") = py::none(), py::kw_only(), py::arg("work") = py::none(),
      R"(Plans the sequences of all ranks, without process groups.

seq_lens_per_rank: for each rank the lengths of its sequences, in tokens. topology: its text, or 'auto' for the best of
rank_topologies for these lengths. d_model: width, in features. solver: one of solver_names(). effort (of the solver
'balanced'): 'low', 'default', 'high', or a number of moves; the plan depends on it and not on the machine. masks: one
mask for all sequences, or one for each, in lists like the lengths' (see attention_pairs). max_tokens_per_rank: a limit
that every rank keeps; lengths that cannot keep it are refused; 0 for none. rank_speed: per rank, relative; empty where
all are equal. cluster: a Cluster, or the name of one; None: the default. model: a TrainedModel; None: the default.
num_heads: in place of the model's; where the number of a group's ranks does not divide it, some ranks have more
attention to compute. work: the work of each sequence, in lists like the lengths', in place of what the formula gives
for its length: FLOPs of one block forward, as from WorkloadModel.work (seconds over seconds per FLOP), positive. Tokens
still count for the exchanges and for max_tokens_per_rank.

Raises ArgumentError, naming the argument. The same input gives the same plan, bit for bit, on any machine.)");
  m.def(
      "plan",
      [](const GivenLengths& seq_lens_per_rank, const GivenText& topology, const GivenInteger& d_model,
         const GivenNumber& gamma, const GivenText& solver, const GivenEffort& effort, const GivenMasks& masks,
         const GivenInteger& max_tokens_per_rank, const GivenNumbers& rank_speed, const GivenCluster& cluster,
         const GivenInteger& num_heads, const GivenModel& model, const GivenMicroBatches& micro_batches,
         const GivenText& sync, const GivenWork& work) {
        StepInput step;
        step.sequences =
            sequences_from(seq_lens_per_rank, d_model, masks, work,
                           settings_from(gamma, num_heads, max_tokens_per_rank, rank_speed, cluster, model));
        step.sync = parse_step_sync(text_from(sync, "sync"));
        const bool is_auto = as_text(micro_batches) == "auto";
        if (!is_auto) {
          const std::optional<int64_t> number = as_integer(micro_batches);
          if (!number || *number < 1 || *number > StepInput::kMaxMicroBatches) {
            throw_argument("micro_batches", shown(micro_batches),
                           text("1 to ", StepInput::kMaxMicroBatches, ", or 'auto'"));
          }
          step.num_micro_batches = static_cast<int32_t>(*number);
        }
        const std::string solver_name = text_from(solver, "solver"), chosen = text_from(topology, "topology");
        const Effort moves = effort_from(effort);
        const py::gil_scoped_release release;
        choose_topology(step, chosen, solver_name, is_auto);
        return is_auto ? plan_fewest_micro_batches(std::move(step), solver_name, moves)
                       : plan_step(std::move(step), solver_name, moves);
      },
      py::arg("seq_lens_per_rank"), py::arg("topology"), py::arg("d_model"), py::arg("gamma") = kDefaultGamma,
      py::arg("solver") = planners().front().name, py::arg("effort") = "default", py::arg("masks") = "full",
      py::arg("max_tokens_per_rank") = 0, py::arg("rank_speed") = py::tuple(), py::arg("cluster") = py::none(),
      py::arg("num_heads") = 0, py::arg("model") = py::none(), py::kw_only(), py::arg("micro_batches"),
      py::arg("sync") = step_sync_name(StepSync::kMicroBatch), py::arg("work") = py::none(),
      R"(Plans an optimizer step of several micro-batches at once: each rank's list holds all its sequences of the step.

micro_batches: how many; 'auto': as few as keep max_tokens_per_rank, which holds in each. sync: where ranks wait for
each other, in every 'micro_batch' (FSDP2, ZeRO-3) or once, at the end of the 'step' (DDP, ZeRO-1 and 2 with no_sync).
The other arguments are as without micro_batches. The step is predicted to take no longer than if each rank's list were
cut in consecutive parts and each part planned by itself (knapformer/core/planners/whole_step/micro_batches.h). Without
max_tokens_per_rank, time alone counts: few micro-batches may hold most tokens.

Raises ArgumentError, naming the argument. The same input gives the same plan, bit for bit, on any machine.)");
  py::class_<TopologyOption>(m, "TopologyOption", "A topology and what it is predicted to do.")
      .def_readonly("topology", &TopologyOption::topology, "Its text.")
      .def_readonly("predicted_time", &TopologyOption::predicted_time_s, "Seconds of a step; mean over the batches.")
      .def_readonly("efficiency_loss", &TopologyOption::efficiency_loss,
                    "Predicted time over ideal time; mean over the batches.")
      .def_readonly("exchanged_fraction", &TopologyOption::exchanged_fraction,
                    "The part of the tokens that each all-to-all of an attention moves.")
      .def_readonly("max_tokens_over_mean", &TopologyOption::max_tokens_over_mean,
                    "Tokens of the fullest rank, over the mean of all ranks.")
      .def_readonly("reason", &TopologyOption::reason,
                    "What its time goes to, or why the limit of tokens cannot be kept.")
      .def("__repr__", [](const TopologyOption& o) {
        return text("TopologyOption('", o.topology, "', predicted_time=", o.predicted_time_s, ", reason='", o.reason,
                    "')");
      });
  m.def(
      "rank_topologies",
      [](const GivenBatches& batches, const GivenInteger& d_model, const GivenNumber& gamma,
         const GivenInteger& num_heads, const GivenText& mask, const GivenInteger& max_tokens_per_rank,
         const GivenNumbers& rank_speed, const GivenCluster& cluster, const GivenModel& model,
         const GivenBatchWork& work) {
        PlanInput common = settings_from(gamma, num_heads, max_tokens_per_rank, rank_speed, cluster, model);
        common.d_model = integer_from(d_model, "d_model");
        const py::str mask_name(text_from(mask, "mask"));
        std::vector<PlanInput> inputs;
        for_each_item(batches, "batches", "a list of batches: of each, for each rank a list of lengths",
                      [&](py::handle batch) {
                        const std::string argument = text("batches[", inputs.size(), "]");
                        PlanInput& input = inputs.emplace_back(common);
                        input.seq_lens = SequenceLengths::from_lists(lengths_per_rank_from(batch, argument));
                        input.attention_pairs = pairs_from(mask_name, input.seq_lens);
                      });
        if (!work.is_none()) give_work(inputs, work);
        const py::gil_scoped_release release;
        return rank_topologies(inputs, planners().front().name);
      },
      py::arg("batches"), py::arg("d_model"), py::arg("gamma") = kDefaultGamma, py::arg("num_heads") = 0,
      py::arg("mask") = "full", py::arg("max_tokens_per_rank") = 0, py::arg("rank_speed") = py::tuple(),
      py::arg("cluster") = py::none(), py::arg("model") = py::none(), py::kw_only(), py::arg("work") = py::none(),
      R"(Topologies for a sample of batches (each batch: for each rank a list of lengths, in tokens), best predicted
time first, with reasons: flat and nested bags of up to two of the cluster's nodes, planned by the default solver. Of
topologies within a thousandth of the time, the one that exchanges less comes first. mask: one for all sequences. work:
a list like `batches`, of numbers. The other arguments are as in plan. Topologies that cannot keep max_tokens_per_rank
come last, with an infinite predicted_time.

Raises ArgumentError.)");
  m.def("head_shares", &head_shares, py::arg("num_heads"), py::arg("num_kv_heads"), py::arg("degree"),
        "For each of the `degree` ranks that share a sequence, how many query heads and how many key/value heads it "
        "computes.\n\n"
        "Raises ArgumentError where num_kv_heads does not divide num_heads, or a count is below 1.");
  m.def(
      "solver_names",
      [] {
        std::vector<std::string_view> names;
        for (const Planner& planner : planners()) names.push_back(planner.name);
        return names;
      },
      "The names that `solver` may be, the default first.");
}
