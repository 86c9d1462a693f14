// Python's Plan: what a step's plan says per sequence and per rank, over all its micro-batches.
#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include <map>

#include "knapformer/bindings/arguments.h"
#include "knapformer/core/cost/bounds.h"
#include "knapformer/core/cost/plan_json.h"
#include "knapformer/core/cost/step_time.h"
#include "knapformer/core/plan/plan.h"
#include "knapformer/core/planners/whole_step/fill_empty_ranks.h"
#include "knapformer/core/util/error.h"

namespace py = pybind11;
using namespace knapformer;  // NOLINT: this file is nothing but names of the core

namespace {

/// By sequence, a value of the plan of its micro-batch: value(plan, its id there).
template <class Value>
auto per_sequence(Value value) {
  return [value](const Plan& step) {
    std::vector<decltype(value(step.plans()[0], SequenceId()))> out;
    step.for_each_sequence([&](SequenceId, const MicroBatchPlan& p, SequenceId id) { out.push_back(value(p, id)); });
    return out;
  };
}

/// By degree, a number of how attention is cut.
auto by_degree(int32_t AttentionCut::*number) {
  return [number](const Plan& step) {
    std::map<int32_t, int32_t> numbers;
    for (const AttentionCut& cut : step.input().sequences.attention_cuts) numbers[cut.degree] = cut.*number;
    return numbers;
  };
}

/// By rank, a value for each chunk there: the micro-batches one after another, in row order.
template <class Field>
auto per_chunk(Field field) {
  return [field](const Plan& step) {
    std::vector<std::vector<int64_t>> out(static_cast<size_t>(step.num_ranks()));
    for (int32_t k = 0; k < step.num_micro_batches(); ++k) {
      const std::vector<SequenceId> ids = step.sequences_of(k);
      const MicroBatchPlan& plan = step.plans()[k];
      for (int32_t r = 0; r < step.num_ranks(); ++r) {
        for (const int32_t index : plan.chunks_on(Rank(r)))
          out[r].push_back(field(plan.chunk(index), ids[plan.chunk(index).sequence.index()]));
      }
    }
    return out;
  };
}

/// By rank, a value of the plan's, summed over the micro-batches.
template <class T>
auto summed(std::span<const T> (MicroBatchPlan::*values)() const) {
  return [values](const Plan& step) {
    std::vector<T> sums(static_cast<size_t>(step.num_ranks()));
    for (const MicroBatchPlan& plan : step.plans())
      for (size_t r = 0; r < sums.size(); ++r) sums[r] += (plan.*values)()[r];
    return sums;
  };
}

LoadBalance balance_before(const Plan& step) { return LoadBalance::of(summed(&MicroBatchPlan::workload_before)(step)); }
LoadBalance balance_after(const Plan& step) { return LoadBalance::of(summed(&MicroBatchPlan::workload_after)(step)); }

py::list chunks(const Plan& step) {
  py::list out;
  step.for_each_sequence([&](SequenceId id, const MicroBatchPlan& plan, SequenceId in_plan) {
    for (const Chunk& c : plan.chunks(in_plan))
      out.append(py::make_tuple(id.value, c.rank.value, c.first_token, c.num_tokens));
  });
  return out;
}

/// The parts of a sequence's queries: (first query, queries, first key, keys, pairs).
py::list parts_of(const MicroBatchPlan& plan, SequenceId id) {
  const int64_t length = plan.seq_lens()[id];
  const Mask mask = plan.input().mask_of(id);
  py::list parts;
  for (const QueryPart& p : plan.query_parts(id))
    parts.append(py::make_tuple(p.first_query, p.num_queries, p.first_key, p.num_keys, mask.pairs_of(length, p)));
  return parts;
}

std::vector<std::string> masks(const Plan& step) {
  std::vector<std::string> texts;
  for (const Mask& mask : step.input().sequences.masks) texts.push_back(mask.str());
  return texts;
}

std::vector<double> chunk_works(const Plan& step) {
  const PlanInput& input = step.input().sequences;
  const AttentionShares shares = input.attention_shares();
  std::vector<double> works;
  step.for_each_sequence([&](SequenceId id, const MicroBatchPlan& plan, SequenceId in_plan) {
    const Placement& place = plan.placement(in_plan);
    for (const Chunk& chunk : plan.chunks(in_plan))
      works.push_back(input.token_work(chunk.num_tokens) +
                      shares.part(input.workload.attention_work_of_pairs(input.pairs_of(id), input.d_model),
                                  place.degree, chunk.rank.value - place.first_rank.value));
  });
  return works;
}

Plan on(const Plan& step, const py::object& cluster, const py::object& model, const py::object& gamma) {
  StepInput input = step.input();
  if (!cluster.is_none()) input.sequences.cluster = cluster_from(cluster);
  if (!model.is_none()) input.sequences.model = model_from(model);
  if (!gamma.is_none()) input.sequences.workload.gamma = number_from(gamma, "gamma");
  input.validate();
  std::vector<PlanInput> inputs = micro_batch_inputs(input, step.micro_batches());
  std::vector<MicroBatchPlan> plans;
  for (int32_t k = 0; k < step.num_micro_batches(); ++k) {
    const MicroBatchPlan& plan = step.plans()[k];
    plans.emplace_back(std::move(inputs[k]), plan.solver(),
                       std::vector(plan.placements().begin(), plan.placements().end()), plan.chunk_lens());
  }
  return {std::move(input), {step.micro_batches().begin(), step.micro_batches().end()}, std::move(plans)};
}

int32_t micro_batch_from(const Plan& plan, py::handle micro_batch) {
  return integer_from<int32_t>(micro_batch, "micro_batch", 0, plan.num_micro_batches() - 1);
}

Rank rank_from(const Plan& plan, py::handle rank) {
  return Rank(integer_from<int32_t>(rank, "rank", 0, plan.num_ranks() - 1));
}

std::vector<std::tuple<int32_t, int64_t, int64_t>> chunks_on(const Plan& plan, const py::object& rank,
                                                             const py::object& micro_batch) {
  std::vector<std::tuple<int32_t, int64_t, int64_t>> held;
  for (const Chunk& chunk : plan.chunks_on(rank_from(plan, rank), micro_batch_from(plan, micro_batch)))
    held.emplace_back(chunk.sequence.value, chunk.first_token, chunk.first_token + chunk.num_tokens);
  return held;
}

std::string describe(const Plan& plan) {
  const std::string several =
      plan.num_micro_batches() == 1
          ? ""
          : text("num_micro_batches=", plan.num_micro_batches(), ", sync='", step_sync_name(plan.input().sync), "', ");
  return text("Plan(", several, "topology='", plan.input().sequences.topology.str(), "', solver='", plan.solver(),
              "', num_ranks=", plan.num_ranks(), ", num_sequences=", plan.seq_lens().num_sequences(),
              ", num_tokens=", plan.num_tokens(), ", wir_before=", balance_before(plan).wir(),
              ", wir_after=", balance_after(plan).wir(), ")");
}

}  // namespace

void bind_plan(py::module_& m) {
  py::class_<Plan, std::shared_ptr<Plan>> plan(
      m, "Plan",
      "Which ranks hold which tokens of every sequence of a step, and in which of its micro-batches. Constant; equal "
      "inputs give equal plans.\n\nA plan of several micro-batches numbers the sequences of the whole step. What is "
      "said per rank is then the sum, or the list, of all micro-batches; `plans` has them one by one.");
  const auto property = properties_of(plan);
  property("topology", "The bags, over all ranks.", [](const Plan& p) { return p.input().sequences.topology; });
  property("workload", "The FLOP formula that the plan was made with.",
           [](const Plan& p) { return p.input().sequences.workload; });
  property("d_model", "Width of the blocks, in features.", [](const Plan& p) { return p.input().sequences.d_model; });
  property("solver", "The name of the solver that made the plan.", &Plan::solver);
  property("num_ranks", "How many ranks all replicas have.", &Plan::num_ranks);
  property("num_sequences", "How many sequences all ranks have.",
           [](const Plan& p) { return p.seq_lens().num_sequences(); });
  property("num_tokens", "How many tokens all sequences have.", &Plan::num_tokens);
  property("seq_lens", "Per home rank, the lengths of its sequences, in tokens.", [](const Plan& p) {
    std::vector<std::vector<int64_t>> lens;
    for (int32_t r = 0; r < p.num_ranks(); ++r) {
      const auto of_rank = p.seq_lens().lens(Rank(r));
      lens.emplace_back(of_rank.begin(), of_rank.end());
    }
    return lens;
  });
  property("num_micro_batches", "How many the step has; some may be empty.", &Plan::num_micro_batches);
  property("micro_batches", "Per sequence, the micro-batch that computes it.", &Plan::micro_batches);
  property("sync", "Where ranks wait for each other: in every 'micro_batch', or once, at the end of the 'step'.",
           [](const Plan& p) { return step_sync_name(p.input().sync); });
  property("plans", "Per micro-batch, a plan of its sequences, which numbers these alone: see sequences_of.",
           [](const py::object& self) {
             const auto& step = self.cast<const Plan&>();
             py::list plans;
             for (int32_t k = 0; k < step.num_micro_batches(); ++k)
               plans.append(step.num_micro_batches() == 1 ? self : py::cast(std::make_shared<Plan>(step.plans()[k])));
             return plans;
           });
  property("bag_of_sequence", "Per sequence, the number of the bag that holds it.",
           per_sequence([](const MicroBatchPlan& p, SequenceId id) { return p.placement(id).bag.value; }));
  property("first_rank_of_sequence", "Per sequence, the first of the consecutive ranks that hold it.",
           per_sequence([](const MicroBatchPlan& p, SequenceId id) { return p.placement(id).first_rank.value; }));
  property("degree_of_sequence", "How many consecutive ranks share each sequence.",
           per_sequence([](const MicroBatchPlan& p, SequenceId id) { return p.placement(id).degree; }));
  property("query_parts",
           "By degree, into how many parts the ranks that share a sequence cut its queries. Empty: they cut heads "
           "alone.",
           by_degree(&AttentionCut::num_parts));
  property("stages", "By degree, in how many stages keys and values travel, all but the first while attention runs.",
           by_degree(&AttentionCut::num_stages));
  property("parts_of_sequence",
           "Per sequence, the parts into which its ranks cut its queries, in rank order: tuples (first "
           "query, queries, first key, keys, pairs).",
           per_sequence(&parts_of));
  property("chunk_lens", "Per rank, the tokens of the chunks that it holds, in row order.",
           per_chunk([](const Chunk& c, SequenceId) { return c.num_tokens; }));
  property("sequences_on", "Per rank, the sequence of each of its chunks, in row order.",
           per_chunk([](const Chunk&, SequenceId id) { return id.value; }));
  property("chunks", "Tuples (sequence, rank, first token, tokens), in sequence order.", &chunks);
  property("workload_before", "Per rank, FLOPs of one block forward where every sequence stays at home.",
           summed(&MicroBatchPlan::workload_before));
  property("workload_after", "Per rank, FLOPs of one block forward under the plan.",
           summed(&MicroBatchPlan::workload_after));
  property("tokens_before", "Per rank, the tokens of its own sequences.", summed(&MicroBatchPlan::tokens_before));
  property("tokens_after", "Per rank, the tokens that it holds under the plan.", summed(&MicroBatchPlan::tokens_after));
  property("wir_before", "Highest over lowest workload of a rank; infinite where a rank has none.",
           [](const Plan& p) { return balance_before(p).wir(); });
  property("wir_after", "The same under the plan.", [](const Plan& p) { return balance_after(p).wir(); });
  property("max_over_mean_before",
           "Highest workload of a rank over the mean, where every sequence stays at home; 1 is even.",
           [](const Plan& p) { return balance_before(p).max_over_mean(); });
  property("max_over_mean_after", "The same under the plan.",
           [](const Plan& p) { return balance_after(p).max_over_mean(); });
  property("max_tokens", "Tokens of the fullest rank of any micro-batch.", &Plan::max_tokens);
  property("max_tokens_per_rank", "The limit of them, as given or by default; 0: none.",
           [](const Plan& p) { return p.input().sequences.max_tokens_per_rank; });
  property("settings", "(name, text) of what it was made with, beside topology and sequences: ranks compare these.",
           [](const Plan& p) { return setting_texts(p.input().sequences); });
  property("tokens_moved", "Tokens held by another rank than their home.", &Plan::tokens_moved);
  property("attention_tokens_moved",
           "(g-1)/g of each token that g ranks share: what attention's all-to-alls move where heads alone are cut.",
           &Plan::attention_tokens_moved);
  property("exchanged_fraction", "attention_tokens_moved over num_tokens.", &Plan::exchanged_fraction);
  property("predicted_time", "Predicted seconds of the step.", [](const Plan& p) { return predict_step(p).total_s; });
  property("predicted_times",
           "Per micro-batch, predicted seconds. They add up to predicted_time where ranks wait in every micro-batch.",
           [](const Plan& p) { return predict_step(p).micro_batch_s; });
  property("lower_bound",
           "No plan of these sequences, this topology and this number of micro-batches takes fewer seconds.",
           [](const Plan& p) { return lower_bound_s(p.input()); });
  property("gap", "predicted_time / lower_bound - 1: how far from the best this plan may be.",
           [](const Plan& p) { return prediction_of(p).gap(); });
  property("ideal_time",
           "Seconds of the step with the work spread evenly and no exchange, plus the fixed time of each micro-batch.",
           [](const Plan& p) { return predict_step(p).ideal_step_s; });
  property("cluster", "The cluster that times are predicted with.",
           [](const Plan& p) { return p.input().sequences.cluster; });
  property("model", "The model that a step runs.", [](const Plan& p) { return p.input().sequences.model; });
  property("sequence_works", "Per sequence, FLOPs of one block forward.",
           per_sequence([](const MicroBatchPlan& p, SequenceId id) { return p.input().work(id); }));
  property("chunk_works", "For each of `chunks`, FLOPs of one block forward that are done on its rank.", &chunk_works);
  property("attention_pairs",
           "Per sequence, how many (query, key) pairs its mask leaves. Empty: full attention everywhere.",
           [](const Plan& p) { return p.input().sequences.attention_pairs; });
  property("masks", "Per sequence, the text of its mask. Empty: full attention everywhere.", &masks);
  plan.def(
          "sequences_of",
          [](const Plan& p, const py::object& micro_batch) {
            std::vector<int32_t> ids;
            for (const SequenceId id : p.sequences_of(micro_batch_from(p, micro_batch))) ids.push_back(id.value);
            return ids;
          },
          py::arg("micro_batch"),
          "The sequences of a micro-batch. Entry n is sequence n of the micro-batch's own plan.")
      .def("chunks_on", &chunks_on, py::arg("rank"), py::arg("micro_batch") = 0,
           "What a rank holds in a micro-batch, in the order of its rows: (sequence, begin, end) of each chunk, in "
           "tokens of the sequence.")
      .def(
          "home_sequences",
          [](const Plan& p, const py::object& rank, const py::object& micro_batch) {
            return p.home_sequences(rank_from(p, rank), micro_batch_from(p, micro_batch));
          },
          py::arg("rank"), py::arg("micro_batch"),
          "The indices, in a rank's own list, of the sequences that a micro-batch computes; ascending.")
      .def("fill_ranks", &fill_empty_ranks,
           "The plan, changed so that every rank has a sequence in every micro-batch, as far as there are sequences "
           "for it: short ones move, and shared ones where a rank takes no whole ones.")
      .def("on", &on, py::arg("cluster") = py::none(), py::arg("model") = py::none(), py::arg("gamma") = py::none(),
           "The same decision on another cluster, for another model, or at another gamma: None leaves the plan's own. "
           "Raises ArgumentError.")
      .def("validate", &Plan::validate, "Checks every promise of a plan; raises StateError with the first one broken.")
      .def("to_json", &plan_to_json, "The plan as text, to be read by from_json.")
      .def_static(
          "from_json", [](const py::object& json) { return plan_from_json(text_from(json, "json")); }, py::arg("json"),
          "The plan that to_json wrote. Raises ArgumentError where the text holds no plan, or no valid one.")
      .def(py::self == py::self)
      .def(py::pickle([](const Plan& p) { return py::str(plan_to_json(p)); },
                      [](const py::str& s) { return plan_from_json(s.cast<std::string>()); }))
      .def("__repr__", &describe);
}
