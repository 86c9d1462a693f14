#include "knapformer/bindings/arguments.h"
#include "knapformer/bindings/torch_bindings.h"
#include "knapformer/core/error.h"

namespace py = pybind11;
using namespace knapformer;  // NOLINT: this file is nothing but names of the library

namespace {

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

}  // namespace

void bind_feedback(BalancerClass& balancer) {
  balancer
      .def(
          "observe",
          [](SequenceBalancer& self, const py::object& seconds) { self.observe(number_from(seconds, "seconds")); },
          py::arg("seconds"),
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
           "Not collective.");
}
