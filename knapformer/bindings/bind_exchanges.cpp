#include "knapformer/bindings/from_python.h"
#include "knapformer/bindings/torch_bindings.h"

namespace py = pybind11;
using namespace knapformer;  // NOLINT: this file is nothing but names of the library

namespace {

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

}  // namespace

void bind_exchanges(BalancerClass& balancer) {
  balancer
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
                             "The name that the op knows this rank's bag by. Empty in a bag of one.");
}
