// knapformer._torch: the balancer for Python. Conversion only.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "knapformer/bindings/effort.h"
#include "knapformer/core/error.h"
#include "knapformer/torch/balancer.h"

namespace py = pybind11;
using namespace knapformer;  // NOLINT: this file is nothing but names of the library

namespace {

ExchangeEngine engine_named(const std::string& name) {
  if (name == "runs") return ExchangeEngine::kRuns;
  if (name == "index") return ExchangeEngine::kIndex;
  throw_argument("engine", text("'", name, "'"), "'runs' or 'index'");
}

std::string type_of(py::handle object) { return py::str(py::type::handle_of(object).attr("__name__")); }

/// Arguments are converted here rather than by pybind11's casters, so that a wrong type is an error like any other:
/// named, and told to the ranks that wait for this one.
at::Tensor tensor_from(py::handle object, std::string_view argument) {
  if (!THPVariable_Check(object.ptr())) throw_argument(argument, type_of(object), "a tensor");
  return THPVariable_Unpack(object.ptr());
}

std::vector<at::Tensor> tensors_from(const py::object& list, std::string_view argument) {
  std::vector<at::Tensor> tensors;
  if (list.is_none()) return tensors;
  if (THPVariable_Check(list.ptr()) || !py::isinstance<py::sequence>(list)) {
    throw_argument(argument, type_of(list), "a list of tensors, or None");
  }
  for (const py::handle item : list) tensors.push_back(tensor_from(item, text(argument, "[", tensors.size(), "]")));
  return tensors;
}

/// Lengths as Python has them: a list (any iterable of integers) or an integer tensor.
std::vector<int64_t> lengths_from(const py::object& seq_lens) {
  if (THPVariable_Check(seq_lens.ptr())) {
    const at::Tensor& tensor = THPVariable_Unpack(seq_lens.ptr());
    if (tensor.dim() != 1 || !at::isIntegralType(tensor.scalar_type(), /*includeBool=*/false)) {
      throw_argument("seq_lens", text("a tensor of shape ", tensor.sizes(), " and dtype ", tensor.scalar_type()),
                     "a list or 1-dimensional tensor of integers");
    }
    const at::Tensor host = tensor.to(at::kCPU, at::kLong).contiguous();
    return {host.const_data_ptr<int64_t>(), host.const_data_ptr<int64_t>() + host.numel()};
  }
  try {
    std::vector<int64_t> lens;
    for (const py::handle item : py::iter(seq_lens)) {
      const auto index = py::reinterpret_steal<py::object>(PyNumber_Index(item.ptr()));
      if (!index) throw py::error_already_set();
      lens.push_back(index.cast<int64_t>());
    }
    return lens;
  } catch (const py::error_already_set&) {
  } catch (const py::cast_error&) {
  }
  throw_argument("seq_lens", std::string(py::repr(seq_lens)), "a list or 1-dimensional tensor of integers");
}

std::vector<Mask> masks_from(const std::optional<std::vector<std::string>>& names) {
  std::vector<Mask> masks;
  if (names) {
    for (const std::string& name : *names) masks.push_back(Mask::parse(name));
  }
  return masks;
}

int64_t width_from(const py::object& d_model) {
  if (!py::isinstance<py::int_>(d_model)) throw_argument("d_model", type_of(d_model), "an integer");
  return d_model.cast<int64_t>();
}

/// `convert` under the GIL, then `call` with its result and without it: others of this process run while ranks wait for
/// each other. What convert throws is reported: `call` reports itself.
template <class Convert, class Call>
auto convert_then_call(SequenceBalancer& self, Convert convert, Call call) {
  auto arguments = [&] {
    try {
      return convert();
    } catch (const Error& error) {
      self.report(error);
      throw;
    }
  }();
  const py::gil_scoped_release release;
  return call(arguments);
}

/// Called under the GIL, by whoever holds it or not.
Attend attend_from(SequenceBalancer& self, const py::object& attend) {
  if (PyCallable_Check(attend.ptr()) == 0) throw_argument("attend", type_of(attend), "a function");
  return [&self, &attend](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& seq_lens) {
    const py::gil_scoped_acquire acquire;
    try {
      return tensor_from(attend(q, k, v, seq_lens), "attend's result");
    } catch (const py::error_already_set& error) {
      self.report(StateError(text("attention: ", std::string(py::str(error.type().attr("__name__"))), ": ",
                                  std::string(py::str(error.value())))));
      throw;
    }
  };
}

py::dict metrics_dict(SequenceBalancer& self) {
  const StepMetrics m = self.metrics();
  py::dict dict;
  const auto set = [&](const char* name, auto value) { dict[py::str(text("balancer/", name))] = value; };
  set("wir_before", m.wir_before);
  set("wir_after", m.wir_after);
  set("max_over_mean_before", m.max_over_mean_before);
  set("max_over_mean_after", m.max_over_mean_after);
  set("tokens_before", m.tokens_before);
  set("tokens_after", m.tokens_after);
  set("tokens_moved", m.tokens_moved);
  set("attention_tokens_moved", m.attention_tokens_moved);
  set("bytes_sent", m.bytes_sent);
  set("num_collectives", m.num_collectives);
  set("planning_s", m.planning_s);
  set("waiting_s", m.waiting_s);
  set("gamma", m.gamma);
  set("rank_speed", m.rank_speed);
  set("given_model_error", m.given_model_error);
  set("learned_model_error", m.learned_model_error);
  return dict;
}

void bind_balancer(py::module_& m) {
  // Its end waits for a thread: not with the GIL, which others of this process need.
  py::class_<SequenceBalancer::PlanningAhead, std::shared_ptr<SequenceBalancer::PlanningAhead>>(
      m, "PlanningAhead", "What start_planning returns.", py::release_gil_before_calling_cpp_dtor())
      .def_property_readonly("ready", &SequenceBalancer::PlanningAhead::ready,
                             "Whether finish_planning would find the thread done.")
      .def_property_readonly("num_ended", &SequenceBalancer::PlanningAhead::num_ended,
                             "Ranks whose data had ended. StateError before finish_planning.");
  py::class_<SequenceBalancer>(m, "SequenceBalancer", "What knapformer.SequenceBalancer is made of.")
      .def(py::init([](const std::string& topology, double gamma, double mask_factor, const std::string& solver,
                       const std::variant<int64_t, std::string>& effort, const std::string& mask,
                       const ClusterModel& cluster, std::vector<double> rank_speed, int64_t max_tokens_per_rank,
                       const std::optional<std::string>& engine, const std::optional<ProcessGroupPtr>& group,
                       const MakeBagGroup& make_bag_group) {
             BalancerOptions options{.workload = {.gamma = gamma, .mask_factor = mask_factor},
                                     .solver = solver,
                                     .effort = effort_of(effort),
                                     .mask = Mask::parse(mask),
                                     .cluster = cluster,
                                     .rank_speed = std::move(rank_speed),
                                     .max_tokens_per_rank = max_tokens_per_rank,
                                     .engine = {}};
             if (engine) options.engine = engine_named(*engine);
             const py::gil_scoped_release release;
             return std::make_unique<SequenceBalancer>(topology, std::move(options), group.value_or(ProcessGroupPtr()),
                                                       make_bag_group);
           }),
           py::arg("topology"), py::kw_only(), py::arg("gamma"), py::arg("mask_factor"), py::arg("solver"),
           py::arg("effort"), py::arg("mask"), py::arg("cluster"), py::arg("rank_speed"),
           py::arg("max_tokens_per_rank"), py::arg("engine"), py::arg("group"), py::arg("make_bag_group"),
           "Collective over `group`. make_bag_group(ranks) is called once by the ranks of each bag of several, counted "
           "inside\n"
           "`group`, and returns their group. engine: 'runs' (CPU tensors), 'index' (any device), None: what suits the "
           "tensors.")
      .def(
          "plan_routing",
          [](SequenceBalancer& self, const py::object& seq_lens, const py::object& d_model,
             const std::optional<std::vector<std::string>>& masks) {
            return convert_then_call(
                self, [&] { return std::make_tuple(lengths_from(seq_lens), width_from(d_model), masks_from(masks)); },
                [&](const auto& arguments) {
                  const auto& [lens, width, parsed] = arguments;
                  return self.plan_routing(lens, width, parsed);
                });
          },
          py::arg("seq_lens"), py::arg("d_model"), py::arg("masks") = py::none(),
          "Learns the lengths of all ranks' sequences, and plans where their tokens go until the next plan_routing.\n\n"
          "seq_lens: tokens of each of this rank's sequences, at least 1 each; a list or an integer tensor (one on an\n"
          "accelerator costs a wait for it). May be empty. d_model: width of the blocks, in features; the same on all "
          "ranks.\n"
          "masks: of each of these sequences, as in knapformer.attention_pairs; None: the balancer's own.\n"
          "Returns the Plan, the same on all ranks.\n\n"
          "Collective over the balancer's group, one collective; on CPU tensors where the group has a CPU backend.")
      .def(
          "start_planning",
          [](SequenceBalancer& self, const py::object& seq_lens, const py::object& d_model, bool ended,
             std::optional<std::string> failure, const std::optional<std::vector<std::string>>& masks) {
            return convert_then_call(
                self, [&] { return std::make_tuple(lengths_from(seq_lens), width_from(d_model), masks_from(masks)); },
                [&](const auto& arguments) {
                  const auto& [lens, width, parsed] = arguments;
                  return self.start_planning(lens, width,
                                             {.masks = parsed, .ended = ended, .failure = std::move(failure)});
                });
          },
          py::arg("seq_lens"), py::arg("d_model"), py::kw_only(), py::arg("ended") = false,
          py::arg("failure") = py::none(), py::arg("masks") = py::none(),
          "The first half of plan_routing, for a step to come: launches the gather of lengths and returns. What is "
          "left to do\n"
          "runs on a thread of its own. Hand what it returns to finish_planning, on all ranks or none.\n\n"
          "ended: this rank's data has ended (PlanningAhead.num_ended). failure: this rank's data has failed, and "
          "why:\n"
          "finish_planning raises StateError on all ranks.\n\n"
          "Collective over the balancer's group, one collective.")
      .def(
          "finish_planning",
          [](SequenceBalancer& self, const std::shared_ptr<SequenceBalancer::PlanningAhead>& ahead) {
            const py::gil_scoped_release release;
            return self.finish_planning(*ahead);
          },
          py::arg("ahead"),
          "The second half of plan_routing: waits for what is left of planning, and makes it the plan that the calls "
          "after this\n"
          "one follow. Returns it. A plan may be taken up again, after others.\n\n"
          "All ranks call it, with what they started together. No collective, except where some rank has more "
          "sequences than\n"
          "any had before.")
      .def(
          "route",
          [](SequenceBalancer& self, const py::object& x, const py::object& features,
             const py::object& sequence_features) -> py::tuple {
            struct Arguments {
              at::Tensor x;
              std::vector<at::Tensor> features, sequence_features;
            };
            SequenceBalancer::Routed routed = convert_then_call(
                self,
                [&] {
                  return Arguments{tensor_from(x, "x"), tensors_from(features, "features"),
                                   tensors_from(sequence_features, "sequence_features")};
                },
                [&](const Arguments& a) { return self.route(a.x, a.features, a.sequence_features); });
            if (sequence_features.is_none()) return py::make_tuple(routed.chunk_lens, routed.x, routed.features);
            return py::make_tuple(routed.chunk_lens, routed.x, routed.features, routed.sequence_features);
          },
          py::arg("x"), py::arg("features") = py::none(), py::arg("sequence_features") = py::none(),
          "Sends this rank's tokens where the plan wants them: (chunk_lens, x, features), and sequence_features as a "
          "fourth\n"
          "where given.\n\n"
          "x, features: (tokens of this rank's sequences, ...), packed in the order of seq_lens; any dtype and "
          "trailing shape\n"
          "each, moved bit for bit. sequence_features: (sequences of this rank, ...), one row a sequence: it goes to "
          "every rank\n"
          "that holds a chunk of the sequence, and its gradient is the sum of theirs.\n"
          "Returns chunk_lens, int32 on the CPU: the tokens of each chunk that this rank now holds; x and features of "
          "these\n"
          "tokens; sequence_features with one row a chunk. Several routes a plan are fine.\n\n"
          "Collective over the balancer's group, one all-to-all for all tensors together, forward and backward. All "
          "ranks pass\n"
          "tensors that differ in their rows alone, and backward runs on all ranks or none; a rank without rows "
          "follows the\n"
          "others in whether gradients travel. With a group of one the tensors come back as views.")
      .def(
          "reverse_route",
          [](SequenceBalancer& self, const py::object& x) {
            SequenceBalancer::Returned returned = convert_then_call(
                self, [&] { return tensor_from(x, "x"); },
                [&](const at::Tensor& tensor) { return self.reverse_route(tensor); });
            return std::make_tuple(returned.seq_lens, returned.x);
          },
          py::arg("x"),
          "Sends tokens home: (seq_lens, x).\n\n"
          "x: (tokens of the chunks that this rank holds, ...), any dtype and trailing shape. Returns x of this rank's "
          "own\n"
          "sequences, in the order of plan_routing's seq_lens, which come first, int32 on the CPU.\n\n"
          "Collective over the balancer's group, one all-to-all, as route.")
      .def(
          "pre_attn",
          [](SequenceBalancer& self, const py::object& q, const py::object& k, const py::object& v) {
            SequenceBalancer::AttentionInputs inputs = convert_then_call(
                self, [&] { return std::array{tensor_from(q, "q"), tensor_from(k, "k"), tensor_from(v, "v")}; },
                [&](const auto& a) { return self.pre_attn(a[0], a[1], a[2]); });
            return std::make_tuple(inputs.seq_lens, inputs.q, inputs.k, inputs.v);
          },
          py::arg("q"), py::arg("k"), py::arg("v"),
          "From all heads of chunks to some heads of whole sequences: (seq_lens, q, k, v).\n\n"
          "q: (chunk tokens, heads, head_dim); k, v: (chunk tokens, kv heads, ...), kv heads a divisor of heads. "
          "Returns\n"
          "seq_lens, int32 on the CPU, of the sequences of this rank's bag; q, k and v of these, whole, packed one "
          "after\n"
          "another, with this rank's share of the heads: plain grouped-query attention, where there is a share (a bag "
          "of more\n"
          "ranks than heads leaves some without). Shares are uneven where the bag's size does not divide the heads.\n\n"
          "Collective over the ranks of this rank's bag, one all-to-all; none in a bag of one, where views come back.")
      .def(
          "post_attn",
          [](SequenceBalancer& self, const py::object& o) {
            SequenceBalancer::AttentionOutput output = convert_then_call(
                self, [&] { return tensor_from(o, "o"); },
                [&](const at::Tensor& tensor) { return self.post_attn(tensor); });
            return std::make_tuple(output.chunk_lens, output.o);
          },
          py::arg("o"),
          "Undoes pre_attn for attention's output: (chunk_lens, o).\n\n"
          "o: (tokens of the sequences that attention saw, this rank's share of the query heads, ...). Returns o with "
          "all heads\n"
          "of the chunks that this rank holds. Needs a pre_attn before it, for the number of heads.\n\n"
          "Collective over the ranks of this rank's bag, one all-to-all; none in a bag of one.")
      .def(
          "attention",
          [](SequenceBalancer& self, const py::object& q, const py::object& k, const py::object& v,
             const py::object& attend) {
            struct Arguments {
              at::Tensor q, k, v;
              Attend attend;
            };
            return convert_then_call(
                self,
                [&] {
                  return Arguments{tensor_from(q, "q"), tensor_from(k, "k"), tensor_from(v, "v"),
                                   attend_from(self, attend)};
                },
                [&](const Arguments& a) { return self.attention(a.q, a.k, a.v, a.attend); });
          },
          py::arg("q"), py::arg("k"), py::arg("v"), py::arg("attend"),
          "Every token of a chunk attends to its whole sequence, over flat and nested bags: o.\n\n"
          "q: (chunk tokens, heads, head_dim); k, v: (chunk tokens, kv heads, ...), kv heads a divisor of heads. "
          "Returns\n"
          "(chunk tokens, heads, ...). attend(q, k, v, seq_lens) -> o is the attention kernel: it sees whole "
          "sequences, "
          "packed,\n"
          "with a share of the heads (see pre_attn), and returns (tokens, heads, ...). It is called once for each "
          "number of\n"
          "ranks that sequences here are shared by; on a rank without tokens once, without any. What is whole on this "
          "rank\n"
          "attends while the rest travels, forward and backward. Where attend raises, the other ranks hear of it.\n\n"
          "Collective over the ranks of this rank's bag: one all-to-all before attention and one after it, none where "
          "no\n"
          "sequence of the bag is shared.")
      .def(
          "attention_exchanges",
          [](SequenceBalancer& self, const at::Device& device) {
            const auto tensors = [](const EndTensors& end) {
              std::vector<at::Tensor> list;
              if (end.table.defined()) list = {end.table, end.rows, end.index};
              return list;
            };
            py::list levels;
            for (const SequenceBalancer::AttentionExchange& level : self.attention_exchanges(device)) {
              levels.append(py::make_tuple(level.degree, level.index_in_group, level.rows, tensors(level.table.send),
                                           tensors(level.table.recv), level.seq_lens));
            }
            return levels;
          },
          py::arg("device"),
          "Of each level of attention: (degree, index_in_group, rows, send, recv, seq_lens), as knapformer.traced "
          "takes them. "
          "Not\n"
          "collective.")
      .def_property_readonly("bag_channel", &SequenceBalancer::bag_channel,
                             "The name that the op knows this rank's bag by. Empty in a bag of one.")
      .def(
          "report", [](SequenceBalancer& self, const std::string& message) { self.report(StateError(message)); },
          py::arg("message"),
          "Tells the other ranks that this one failed and will not come to the calls they wait in: they raise "
          "StateError with\n"
          "this message. Not collective.")
      .def_property_readonly(
          "plan", [](const SequenceBalancer& self) { return self.plan(); },
          "Of the last plan_routing. StateError before it.")
      .def_property_readonly("seq_lens", &SequenceBalancer::seq_lens,
                             "int32 on the CPU: tokens of this rank's sequences in that plan.")
      .def("observe", &SequenceBalancer::observe, py::arg("seconds"),
           "Feeds back how long this rank was busy with the step of the last plan: its forward and backward passes, "
           "without\n"
           "waiting for other ranks. The ranks hear of it with the lengths of the next plan, learn gamma and every "
           "rank's speed\n"
           "from it, all alike, and the plan after that follows. A warning says once where the workload model that was "
           "given\n"
           "misses what is observed by more than 10 %. A rank may skip steps. Raises ArgumentError where seconds are "
           "not positive\n"
           "and finite, StateError before plan_routing. Not collective.")
      .def("metrics", &metrics_dict,
           "What a training loop may log of the step since the last plan, as far as it has come: a flat dict of "
           "numbers, keys\n"
           "'balancer/...'. wir and max_over_mean: of the work per rank, before and after; tokens_before, "
           "tokens_after: of this rank;\n"
           "tokens_moved: by one route, all ranks; attention_tokens_moved: by each exchange of an attention, all "
           "ranks; bytes_sent,\n"
           "num_collectives: this rank's; planning_s: the plan and its tables; waiting_s: the host waited for other "
           "ranks in the\n"
           "balancer's collectives (with tensors on an accelerator its stream waits instead, which is not in it); "
           "gamma, rank_speed:\n"
           "planned with; given_model_error, learned_model_error: of the workload model against what was observed. "
           "Not collective.")
      .def_property_readonly("rank", &SequenceBalancer::rank, "Inside the balancer's group.")
      .def_property_readonly("num_ranks", &SequenceBalancer::num_ranks);
}

}  // namespace

PYBIND11_MODULE(_torch, m) {
  m.doc() = "What moves tensors between ranks: knapformer's C++ on LibTorch and c10d. knapformer.balancer is its face.";
  py::module_::import("knapformer._core");   // Plan, and how errors translate
  py::module_::import("torch.distributed");  // ProcessGroup
  bind_balancer(m);
}
