#include <pybind11/stl.h>

#include <algorithm>
#include <iterator>

#include "knapformer/bindings/arguments.h"
#include "knapformer/core/model/mask.h"
#include "knapformer/core/plan/attention_shares.h"
#include "knapformer/core/planners/planner.h"
#include "knapformer/core/planners/whole_step/step_solver.h"
#include "knapformer/core/planners/whole_step/topology_choice.h"
#include "knapformer/core/util/error.h"

namespace py = pybind11;
using namespace knapformer;  // NOLINT: this file is nothing but names of the core

namespace {

/// How many (query, key/value) heads each rank of a group computes.
std::vector<std::pair<size_t, size_t>> head_shares(py::handle num_heads, py::handle num_kv_heads, py::handle degree) {
  const auto num_ranks = integer_from<int32_t>(degree, "degree", 1);
  const HeadPartition heads =
      partition_heads(integer_from(num_heads, "num_heads"), integer_from(num_kv_heads, "num_kv_heads"), num_ranks);
  std::vector<std::pair<size_t, size_t>> counts;
  for (int32_t i = 0; i < num_ranks; ++i) counts.emplace_back(heads.query.of(i).size(), heads.key_value.of(i).size());
  return counts;
}

/// For each rank a list of lengths.
SequenceLengths lengths_from(py::handle lists, std::string_view argument) {
  std::vector<std::vector<int64_t>> lens;
  for_each_item(lists, argument, "for each rank a list of lengths", [&](py::handle list) {
    // Not text(), which is slower: this runs for every rank's list.
    const std::string name = std::string(argument).append("[").append(std::to_string(lens.size())).append("]");
    lens.push_back(list_from<int64_t>(list, name, "a list of lengths, in tokens", "a length, in tokens", as_integer));
  });
  return SequenceLengths::from_lists(lens);
}

/// A value for each sequence, in lists like the lengths'.
template <class T>
std::vector<T> list_like_lengths(py::handle lists, std::string_view argument, const SequenceLengths& seq_lens,
                                 std::string_view expected_item, std::optional<T> (*convert)(py::handle)) {
  std::vector<T> all;
  int32_t num_lists = 0;
  for_each_item(lists, argument, "for each rank a list like its lengths'", [&](py::handle list) {
    const std::string name = text(argument, "[", num_lists, "]");
    std::vector<T> of_rank = list_from<T>(list, name, "a list like the rank's lengths", expected_item, convert);
    const size_t count = num_lists < seq_lens.num_ranks() ? seq_lens.lens(Rank(num_lists)).size() : of_rank.size();
    if (of_rank.size() != count)
      throw_argument(argument, text(of_rank.size(), " for rank ", num_lists),
                     text("one for each of its ", count, " sequences"));
    std::ranges::move(of_rank, std::back_inserter(all));
    ++num_lists;
  });
  if (num_lists != seq_lens.num_ranks())
    throw_argument(argument, text(num_lists, " lists"), text("one for each of the ", seq_lens.num_ranks(), " ranks"));
  return all;
}

/// One mask for all sequences, or one for each.
void give_masks(PlanInput& input, py::handle masks) {
  if (const std::optional<Mask> mask = as_mask(masks)) return input.give_mask(*mask);
  input.give_masks(list_like_lengths<Mask>(masks, "masks", input.seq_lens, "the text of a mask", as_mask));
}

void give_work(PlanInput& input, py::handle lists) {
  input.give_work(list_like_lengths<double>(lists, "work", input.seq_lens, "a number", as_number));
}

/// Takes for each batch what `give` takes of one.
void give_each(std::vector<PlanInput>& batches, py::handle lists, std::string_view argument,
               void (*give)(PlanInput&, py::handle)) {
  size_t num_lists = 0;
  for_each_item(lists, argument, "None, or a list like batches", [&](py::handle of_batch) {
    if (num_lists < batches.size()) give(batches[num_lists], of_batch);
    ++num_lists;
  });
  if (num_lists != batches.size())
    throw_argument(argument, text(num_lists, " lists"), text("one for each of the ", batches.size(), " batches"));
}

Plan plan_of(py::handle seq_lens_per_rank, py::handle topology, py::handle cost, py::handle micro_batches,
             py::handle max_tokens_per_rank, py::handle masks, py::handle work, py::handle solver) {
  StepInput step{.sequences = settings_from(cost, max_tokens_per_rank)};
  step.sequences.d_model = width_from(cost.attr("d_model"));
  step.sequences.seq_lens = lengths_from(seq_lens_per_rank, "seq_lens_per_rank");
  give_masks(step.sequences, masks.is_none() ? cost.attr("mask") : py::reinterpret_borrow<py::object>(masks));
  if (!work.is_none()) give_work(step.sequences, work);
  const bool is_auto = as_text(micro_batches) == "auto";
  if (!is_auto) {
    constexpr int32_t kMax = StepInput::kMaxMicroBatches;
    step.num_micro_batches =
        integer_from<int32_t>(micro_batches, "micro_batches", 1, kMax, text("1 to ", kMax, ", or 'auto'"));
  }
  step.sync = parse_step_sync(text_from(cost.attr("sync"), "sync"));
  const std::string solver_name = solver_from(solver), chosen = text_from(topology, "topology");
  const Effort moves = effort_from(cost.attr("effort"));
  const py::gil_scoped_release release;
  step.sequences.topology =
      Topology::parse(chosen == "auto" ? best_topology(step, solver_name, /*fewest=*/is_auto) : chosen,
                      step.sequences.seq_lens.num_ranks());
  return is_auto ? plan_fewest_micro_batches(std::move(step), solver_name, moves)
                 : plan_step(std::move(step), solver_name, moves);
}

std::vector<TopologyOption> rank_topologies_of(py::handle batches, py::handle cost, py::handle max_tokens_per_rank,
                                               py::handle masks, py::handle work) {
  PlanInput common = settings_from(cost, max_tokens_per_rank);
  common.d_model = width_from(cost.attr("d_model"));
  const Mask mask = mask_from(cost.attr("mask"));
  std::vector<PlanInput> inputs;
  for_each_item(batches, "batches", "a list of batches: of each, for each rank a list of lengths",
                [&](py::handle batch) {
                  const std::string argument = text("batches[", inputs.size(), "]");
                  PlanInput& input = inputs.emplace_back(common);
                  input.seq_lens = lengths_from(batch, argument);
                  input.give_mask(mask);
                });
  if (!masks.is_none()) give_each(inputs, masks, "masks", give_masks);
  if (!work.is_none()) give_each(inputs, work, "work", give_work);
  const py::gil_scoped_release release;
  return rank_topologies(inputs, planners().front().name);
}

}  // namespace

void bind_planner(py::module_& m) {
  m.def("plan", &plan_of);
  m.def("rank_topologies", &rank_topologies_of);
  m.def("head_shares", &head_shares);
  m.def("solver_names", [] {
    std::vector<std::string_view> names;
    for (const Planner& planner : planners()) names.push_back(planner.name);
    return names;
  });
  py::class_<TopologyOption> option(m, "TopologyOption", "A topology and what it is predicted to do.");
  const auto property = properties_of(option);
  property("topology", "Its text.", &TopologyOption::topology);
  property("predicted_time", "Seconds of a step; mean over the batches; infinite if the limit of tokens is not kept.",
           &TopologyOption::predicted_time_s);
  property("over_ideal", "Predicted time over ideal time; mean over the batches.", &TopologyOption::over_ideal);
  option.def("__repr__", [](const TopologyOption& o) {
    return text("TopologyOption('", o.topology, "', predicted_time=", o.predicted_time_s, ")");
  });
}
