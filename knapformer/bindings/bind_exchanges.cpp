#include <ATen/ops/empty.h>

#include "knapformer/bindings/from_python.h"
#include "knapformer/bindings/torch_bindings.h"

namespace py = pybind11;
using namespace knapformer;  // NOLINT: this file is nothing but names of the library

namespace {

using GivenKernel = Given<
    "collections.abc.Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], "
    "torch.Tensor | tuple[torch.Tensor, torch.Tensor]]">;

using GivenMask = Given<"str | None">;

/// Calls `attend` under the GIL, whether or not the caller holds it.
Attend attend_from(SequenceBalancer& self, const GivenKernel& attend) {
  if (PyCallable_Check(attend.ptr()) == 0) throw_argument("attend", type_of(attend), "a function");
  return [&self, &attend](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const at::Tensor& seq_lens) -> Attended {
    const py::gil_scoped_acquire acquire;
    try {
      const py::object result = attend(q, k, v, seq_lens);
      if (!py::isinstance<py::tuple>(result)) return tensor_from(result, "attend's result");
      const auto pair = result.cast<py::tuple>();
      if (pair.size() != 2) throw_argument("attend's result", text(pair.size(), " values"), "o, or (o, log_sum_exp)");
      return {tensor_from(pair[0], "attend's result"), tensor_from(pair[1], "attend's log_sum_exp")};
    } catch (const py::error_already_set& error) {
      self.report(StateError(text("attention: ", std::string(py::str(error.type().attr("__name__"))), ": ",
                                  std::string(py::str(error.value())))));
      throw;
    }
  };
}

KernelMask mask_from(const GivenText& mask) {
  const std::string name = text_from(mask, "mask");
  return name == "planned" ? std::nullopt : std::optional(Mask::parse(name));
}

/// None: the kernel's own attribute `mask`, as PackedAttention has it, or "full".
KernelMask mask_from(const GivenMask& mask, const GivenKernel& attend) {
  std::optional<std::string> own;
  if (PyFunction_Check(attend.ptr()) == 0) own = as_text(py::getattr(attend, "mask", py::none()));  // a miss is slow
  if (mask.is_none()) return Mask::parse(own.value_or("full"));
  if (own && own != as_text(mask)) throw_argument("mask", shown(mask), text("'", *own, "', as attend.mask says"));
  return mask_from(py::reinterpret_borrow<GivenText>(mask));
}

}  // namespace

void bind_exchanges(BalancerClass& balancer) {
  balancer
      .def(
          "route",
          [](SequenceBalancer& self, const GivenTensor& x, const GivenTensors& features,
             const GivenTensors& sequence_features) -> py::typing::Tuple<py::object, py::ellipsis> {
            SequenceBalancer::Routed routed = convert_then_call(
                self,
                [&] {
                  return std::tuple(tensor_from(x, "x"), tensors_from(features, "features"),
                                    tensors_from(sequence_features, "sequence_features"));
                },
                [&](const auto&... tensors) { return self.route(tensors...); });
            if (sequence_features.is_none()) return py::make_tuple(routed.chunk_lens, routed.x, routed.features);
            return py::make_tuple(routed.chunk_lens, routed.x, routed.features, routed.sequence_features);
          },
          py::arg("x"), py::arg("features") = py::none(), py::arg("sequence_features") = py::none(),
          R"(Sends this rank's tokens where the plan wants them: (chunk_lens, x, features), and sequence_features as
a fourth where given.

x, features: (tokens of this rank's sequences, ...), packed in the order of seq_lens; any dtype and trailing shape
each, moved bit for bit. sequence_features: (sequences of this rank, ...), one row a sequence: it goes to every rank
that holds a chunk of the sequence, and its gradient is the sum of theirs. Returns chunk_lens, int32 on the CPU: the
tokens of each chunk that this rank now holds; x and features of these tokens; sequence_features with one row a chunk.
route may be called several times with one plan.

Collective over the balancer's group, one all-to-all for all tensors together, forward and backward. All ranks pass
tensors that differ only in their number of rows, and backward runs on all ranks or none. A rank without rows computed
nothing: whether gradients travel, its tensors need not say. It waits until a rank with rows tells it, in every call
anew, so what makes x may be frozen and trained in turn. With a group of one the tensors come back as views.)")
      .def(
          "reverse_route",
          [](SequenceBalancer& self, const GivenTensor& x) {
            SequenceBalancer::Returned returned = convert_then_call(
                self, [&] { return std::tuple(tensor_from(x, "x")); },
                [&](const at::Tensor& tensor) { return self.reverse_route(tensor); });
            return std::make_tuple(returned.seq_lens, returned.x);
          },
          py::arg("x"),
          R"(Sends tokens home: (seq_lens, x).

x: (tokens of the chunks that this rank holds, ...), any dtype and trailing shape. Returns plan_routing's seq_lens,
int32 on the CPU, and x of this rank's own sequences, in their order.

Collective over the balancer's group, one all-to-all, as route is.)")
      .def(
          "pre_attn",
          [](SequenceBalancer& self, const GivenTensor& q, const GivenTensor& k, const GivenTensor& v,
             const GivenText& mask) {
            SequenceBalancer::AttentionInputs inputs = convert_then_call(
                self,
                [&] {
                  return std::tuple(tensor_from(q, "q"), tensor_from(k, "k"), tensor_from(v, "v"), mask_from(mask));
                },
                [&](const auto&... arguments) { return self.pre_attn(arguments...); });
            return std::make_tuple(inputs.seq_lens, inputs.q, inputs.k, inputs.v);
          },
          py::arg("q"), py::arg("k"), py::arg("v"), py::arg("mask") = "full",
          R"(From all heads of chunks to some heads of whole sequences: (seq_lens, q, k, v).

q: (chunk tokens, heads, head_dim); k, v: (chunk tokens, kv heads, ...), kv heads a divisor of heads. Returns seq_lens,
int32 on the CPU, of the sequences of this rank's bag, and their q, k and v: whole sequences, packed one after another,
with this rank's share of the heads, so that attention is plain grouped-query attention. Shares are uneven where the
bag's size does not divide the heads; in a bag of more ranks than heads some ranks have none. mask: the one that the
kernel applies, as in attention.

Collective over the ranks of this rank's bag, one all-to-all; none in a bag of one, where views come back.)")
      .def(
          "post_attn",
          [](SequenceBalancer& self, const GivenTensor& o) {
            SequenceBalancer::AttentionOutput output = convert_then_call(
                self, [&] { return std::tuple(tensor_from(o, "o")); },
                [&](const at::Tensor& tensor) { return self.post_attn(tensor); });
            return std::make_tuple(output.chunk_lens, output.o);
          },
          py::arg("o"),
          R"(Undoes pre_attn for attention's output: (chunk_lens, o).

o: (tokens of the sequences that attention saw, this rank's share of the query heads, ...). Returns o with all heads
of the chunks that this rank holds. Needs a pre_attn before it, for the number of heads.

Collective over the ranks of this rank's bag, one all-to-all; none in a bag of one.)")
      .def(
          "attention",
          [](SequenceBalancer& self, const GivenTensor& q, const GivenTensor& k, const GivenTensor& v,
             const GivenKernel& attend, const GivenMask& mask) {
            return convert_then_call(
                self,
                [&] {
                  return std::tuple(tensor_from(q, "q"), tensor_from(k, "k"), tensor_from(v, "v"),
                                    attend_from(self, attend), mask_from(mask, attend));
                },
                [&](const auto&... arguments) { return self.attention(arguments...); });
          },
          py::arg("q"), py::arg("k"), py::arg("v"), py::arg("attend"), py::arg("mask") = py::none(),
          R"(Every token of a chunk attends to its whole sequence, over flat and nested bags: o.

q: (chunk tokens, heads, head_dim); k, v: (chunk tokens, kv heads, ...), kv heads a divisor of heads. Returns (chunk
tokens, heads, ...). attend(q, k, v, seq_lens) is the attention kernel: it sees whole sequences, packed, with a share of
the heads (see pre_attn), and returns o, (tokens, heads, ...), or (o, log_sum_exp), of which the second is not used. It
is called once for each degree (number of sharing ranks) of the sequences here; on a rank without tokens it is called
once, with none. Where more ranks than heads share a sequence, some see it without heads. Sequences that are whole on
this rank attend while the others travel, forward and backward. Where attend raises, the other ranks raise the error,
too.

mask: the one that attend applies, as in knapformer.attention_pairs, or 'planned' where attend applies to each sequence
the mask that was planned for it. None: attend.mask where attend is an object with that text, as PackedAttention of
knapformer.models, or else 'full'. Raises ArgumentError on all ranks where the plan counts with another mask (the
balancer's, that of plan_routing or that of the sampler); with given work and no mask, it counts with none.

Collective over the ranks of this rank's bag: one all-to-all before attention and one after it, none where no sequence
of the bag is shared.)")
      .def(
          "op_attention",
          [](SequenceBalancer& self, const at::Device& device, const GivenText& mask) {
            const KernelMask applied = convert_or_report([&] { return mask_from(mask); },
                                                         [&](const std::exception& error) { self.report(error); });
            const Ulysses ulysses = self.ulysses_on(device, applied);
            const auto of_op = [](const ExchangeArguments& arguments) {
              OpSegments segments(arguments.segments);
              return std::make_tuple(std::move(segments.tables), std::move(segments.layout), arguments.group,
                                     arguments.label);
            };
            std::vector<at::Tensor> rows;
            std::vector<bool> travels;
            for (size_t level = 0; level < ulysses.tables.levels.size(); ++level) {
              rows.push_back(at::empty({ulysses.tables.levels[level].num_rows, 0}));
              travels.push_back(ulysses.travels(level));
            }
            const std::vector<at::Tensor> seq_lens(ulysses.seq_lens.begin(), ulysses.seq_lens.end());
            return std::make_tuple(rows, seq_lens, travels, of_op(ulysses.to_sequences({})),
                                   of_op(ulysses.to_rows({})));
          },
          py::arg("device"), py::arg("mask") = "full",
          R"(For knapformer.compile: what attention takes in this step, for tensors on `device`. mask: as in attention.

Returns (rows, seq_lens, travels, to_sequences, to_rows). The first three have an entry for each level of attention:
(rows of this rank, 0); the lengths of the sequences that attention sees, int32 on the CPU; whether the level's rows
travel. The others are arguments of the op knapformer::exchange for the levels that travel: (tables, layout, group,
label). Not collective.)");
}
