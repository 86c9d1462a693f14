#include "knapformer/torch/exchange/exchange.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <utility>

#include "knapformer/core/util/error.h"
#include "knapformer/torch/comm/comm_group.h"
#include "knapformer/torch/exchange/in_flight.h"

namespace knapformer {

using Tensors = std::vector<at::Tensor>;

// The op's schema: ExchangeArguments <-> the dispatcher's arguments.

static constexpr size_t kTables = 6;  // tensors of a segment's table

OpArguments::OpArguments(const ExchangeArguments& a)
    : layout{a.joined_end, a.num_local_rows, static_cast<int64_t>(a.segments.size())}, names{a.group, a.call} {
  tables.reserve(kTables * a.segments.size());
  for (const auto& [table, roles, sharing] : a.segments) {
    tables.insert(tables.end(), {table.send.table, table.send.rows, table.send.index, table.recv.table, table.recv.rows,
                                 table.recv.index});
    layout.insert(layout.end(),
                  {sharing.shared_end, sharing.degree, sharing.index_in_group, static_cast<int64_t>(roles.size())});
    for (const HeadRole role : roles) layout.push_back(static_cast<int64_t>(role));
  }
  names.insert(names.end(), a.names.begin(), a.names.end());
}

namespace {

constexpr const char* kSchema =
    "(Tensor[] tensors, int[] differentiable, int[] heads, Tensor[] tables, int[] layout, str[] names, Tensor[] local)";

using Names = at::ArrayRef<std::string>;

template <class Result>
using OpSignature = Result(at::TensorList, at::IntArrayRef, at::IntArrayRef, at::TensorList, at::IntArrayRef, Names,
                           at::TensorList);

ExchangeArguments arguments_from(at::TensorList tensors, at::IntArrayRef differentiable, at::IntArrayRef heads,
                                 at::TensorList tables, at::IntArrayRef layout, Names names, at::TensorList local) {
  const auto check = [&](bool fits, const char* argument) {
    if (fits) return;
    throw ArgumentError(text("exchange: got ", argument, " that do not fit the tensors, expected those of one call"));
  };
  auto next = layout.begin();
  const auto take = [&](int64_t min, int64_t max) {
    check(next != layout.end() && *next >= min && *next <= max, "layout");
    return *next++;
  };
  constexpr int64_t kAny = std::numeric_limits<int32_t>::max();
  check(heads.size() == 2, "heads");
  check(names.size() >= 2, "names");
  check(differentiable.empty() || differentiable.size() == tensors.size(), "differentiable");
  ExchangeArguments arguments{.tensors = tensors.vec(),
                              .heads = {.num_heads = heads[0], .num_kv_heads = heads[1]},
                              .joined_end = static_cast<HeadSharing::End>(take(0, HeadSharing::kRecv)),
                              .num_local_rows = take(0, std::numeric_limits<int64_t>::max()),
                              .local = local.vec(),
                              .differentiable = differentiable.vec(),
                              .group = names[0],
                              .call = names[1],
                              .names = names.slice(2).vec()};
  arguments.segments.resize(static_cast<size_t>(take(0, static_cast<int64_t>(tables.size() / kTables))));
  size_t num_slots = 0, first_table = 0;
  for (SegmentArguments& segment : arguments.segments) {
    const at::Tensor* t = &tables[std::exchange(first_table, first_table + kTables)];
    segment.table = {.send = {.table = t[0], .rows = t[1], .index = t[2]},
                     .recv = {.table = t[3], .rows = t[4], .index = t[5]}};
    segment.sharing = {.shared_end = static_cast<HeadSharing::End>(take(0, HeadSharing::kRecv)),
                       .degree = static_cast<int32_t>(take(1, kAny)),
                       .index_in_group = static_cast<int32_t>(take(0, kAny))};
    segment.roles.resize(static_cast<size_t>(take(1, kAny)));
    for (HeadRole& role : segment.roles) {
      role = static_cast<HeadRole>(take(0, heads[0] < 1 ? 0 : static_cast<int64_t>(HeadRole::kKeyValue)));
    }
    num_slots += segment.roles.size();
    check(arguments.joined_end == HeadSharing::kNeither || segment.roles.size() == arguments.num_slots(), "layout");
  }
  const bool splits = arguments.joined_end == HeadSharing::kSend && num_slots > 0;
  check(next == layout.end() && (splits ? arguments.num_slots() : num_slots) == tensors.size(), "layout");
  check(arguments.names.empty() || arguments.names.size() == num_slots, "names");
  return arguments;
}

/// Makes a function of the dispatcher's signature from one that takes ExchangeArguments.
template <auto kCall>
auto kernel(at::TensorList tensors, at::IntArrayRef differentiable, at::IntArrayRef heads, at::TensorList tables,
            at::IntArrayRef layout, Names names, at::TensorList local) {
  return kCall(arguments_from(tensors, differentiable, heads, tables, layout, names, local));
}

template <class Result>
Result call_op(const c10::TypedOperatorHandle<OpSignature<Result>>& op, const ExchangeArguments& a) {
  const OpArguments of_op(a);
  const int64_t heads[] = {a.heads.num_heads, a.heads.num_kv_heads};
  return op.call(a.tensors, a.differentiable, heads, of_op.tables, of_op.layout, of_op.names, a.local);
}

template <class Signature>
c10::TypedOperatorHandle<Signature> find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

Tensors call_exchange(const ExchangeArguments& arguments) {
  static const auto op = find_op<OpSignature<Tensors>>("knapformer::exchange");
  return call_op<Tensors>(op, arguments);
}

at::Tensor call_start(const ExchangeArguments& arguments) {
  static const auto op = find_op<OpSignature<at::Tensor>>("knapformer::exchange_start");
  return call_op<at::Tensor>(op, arguments);
}

Tensors call_finish(const at::Tensor& started, const Tensors& local = {}) {
  static const auto op = find_op<Tensors(const at::Tensor&, at::TensorList)>("knapformer::exchange_finish");
  return op.call(started, local);
}

Tensors exchange_kernel(const ExchangeArguments& arguments) { return InFlight(arguments).finish(arguments.local); }

at::Tensor start_kernel(ExchangeArguments arguments) { return InFlight::start(std::move(arguments)); }

Tensors finish_kernel(const at::Tensor& started, at::TensorList local) {
  return InFlight::of(started).finish(local.vec());
}

Tensors shapes_kernel(const ExchangeArguments& arguments) {
  Tensors outputs;
  for (const std::vector<c10::SymInt>& shape : arguments.output_shapes()) {
    outputs.push_back(at::empty_symint(shape, arguments.input_of(outputs.size()).options()));
  }
  return outputs;
}

using torch::autograd::AutogradContext;

/// What makes zeros in place of a tensor.
struct Metadata {
  c10::SymDimVector shape;
  at::TensorOptions options;
};

std::vector<Metadata> metadata_of(at::TensorList tensors) {
  std::vector<Metadata> metadata;
  metadata.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    metadata.push_back({.shape = c10::SymDimVector(tensor.sym_sizes()), .options = tensor.options()});
  }
  return metadata;
}

/// Arguments that autograd keeps for the backward, without looking into them.
struct KeptArguments : torch::CustomClassHolder {
  explicit KeptArguments(ExchangeArguments kept)
      : arguments(std::move(kept)), group(CommGroup::find_if_alive(arguments.group)) {
    local = metadata_of(arguments.local_rows());
    arguments.tensors.clear();
    arguments.local.clear();
  }
  /// Puts zeros for gradients that the backward pass did not bring; outputs whose gradient does not travel get none.
  Tensors with_zeros(Tensors gradients) const {
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (gradients[i].defined() || !arguments.has_gradient(i)) continue;
      gradients[i] = at::zeros_symint(outputs[i].shape, outputs[i].options);
    }
    return gradients;
  }

  /// For joined inputs whose gradient travels: the gradients of their rows that did not travel. `given`: one for each
  /// input, or empty; zeros where one is missing.
  Tensors local_gradients(at::TensorList given) const {
    Tensors gradients;
    for (size_t i = 0; i < local.size(); ++i) {
      if (!arguments.has_gradient(i)) continue;
      const bool known = i < given.size() && given[i].defined();
      gradients.push_back(known ? given[i] : at::zeros_symint(local[i].shape, local[i].options));
    }
    return gradients;
  }

  ExchangeArguments arguments;
  std::vector<Metadata> outputs;     // where known: empty for a start
  std::vector<Metadata> local;       // joined inputs: of their rows that do not travel
  std::shared_ptr<CommGroup> group;  // alive for the backward, even if the balancer ends before; null while tracing
};

KeptArguments& keep_arguments(AutogradContext& context, ExchangeArguments arguments) {
  auto kept = c10::make_intrusive<KeptArguments>(std::move(arguments));
  context.saved_data["arguments"] = c10::IValue::make_capsule(kept);
  return *kept;
}

const KeptArguments& kept_by(AutogradContext& context) {
  // The context holds it for longer than this reference lives.
  return static_cast<const KeptArguments&>(*context.saved_data["arguments"].toCapsule());
}

/// Returns the outputs of a forward, and keeps all that its backward needs. local: the given rows of joined outputs.
Tensors kept_outputs(AutogradContext& context, Tensors outputs, ExchangeArguments arguments, at::TensorList local) {
  Tensors fixed;
  for (size_t i = 0; i < outputs.size(); ++i) {
    const bool of_local = i < local.size() && local[i].requires_grad();
    if (!of_local && !arguments.has_gradient(i)) fixed.push_back(outputs[i]);
  }
  if (!fixed.empty()) context.mark_non_differentiable(fixed);
  context.set_materialize_grads(false);  // with_zeros makes those that are needed
  keep_arguments(context, std::move(arguments)).outputs = metadata_of(outputs);
  return outputs;
}

std::atomic<void (*)(const Error&)> raise_as_told{nullptr};

/// Appends the gradients of rows that were given to an exchange and did not travel, as views.
void append_local_gradients(Tensors& results, const Tensors& gradients, const ExchangeArguments& arguments) {
  if (arguments.joined_end != HeadSharing::kRecv || arguments.num_local_rows == 0) return;
  for (const at::Tensor& gradient : gradients) {
    results.push_back(gradient.defined() ? gradient.narrow(0, 0, arguments.num_local_rows) : gradient);
  }
}

Tensors exchange_with_gradients(ExchangeArguments arguments);
at::Tensor start_autograd(ExchangeArguments arguments);

class ExchangeFunction : public torch::autograd::Function<ExchangeFunction> {
 public:
  /// tensors: those of the arguments, then their local ones.
  static Tensors forward(AutogradContext* context, at::TensorList, ExchangeArguments& arguments) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    Tensors outputs = call_exchange(arguments);
    const Tensors local = arguments.local;
    return kept_outputs(*context, std::move(outputs), std::move(arguments), local);
  }

  static Tensors backward(AutogradContext* context, const Tensors& gradients) {
    const KeptArguments& forward = kept_by(*context);
    Tensors results(forward.arguments.differentiable.size());
    if (forward.arguments.any_gradient()) {
      results = in_backward([&] {
        ExchangeArguments back = forward.arguments.inverse(forward.with_zeros(gradients));
        back.local = forward.local_gradients({});
        return forward.arguments.gradients_from(exchange_with_gradients(std::move(back)));
      });
    }
    append_local_gradients(results, gradients, forward.arguments);
    results.emplace_back();  // for the arguments, which have no gradient
    return results;
  }
};

/// Returns the tensor that stands for what is in flight, then the rows that do not travel.
class StartFunction : public torch::autograd::Function<StartFunction> {
 public:
  static Tensors forward(AutogradContext* context, at::TensorList, ExchangeArguments& arguments) {
    Tensors results = arguments.local_rows();
    Tensors fixed;
    for (size_t i = 0; i < results.size(); ++i) {
      if (!arguments.has_gradient(i)) fixed.push_back(results[i]);
    }
    context->mark_non_differentiable(fixed);
    context->set_materialize_grads(false);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    results.insert(results.begin(), call_start(arguments));
    keep_arguments(*context, std::move(arguments));
    return results;
  }

  static Tensors backward(AutogradContext* context, const Tensors& gradients) {
    const KeptArguments& forward = kept_by(*context);
    Tensors results = in_backward([&] {
      const Tensors local = forward.local_gradients(at::TensorList(gradients).slice(1));
      return forward.arguments.gradients_from(call_finish(gradients[0], local));
    });
    results.emplace_back();
    return results;
  }
};

class FinishFunction : public torch::autograd::Function<FinishFunction> {
 public:
  static Tensors forward(AutogradContext* context, const at::Tensor& started, at::TensorList local) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return kept_outputs(*context, call_finish(started, local.vec()), InFlight::of(started).arguments(), local);
  }

  static Tensors backward(AutogradContext* context, const Tensors& gradients) {
    const KeptArguments& forward = kept_by(*context);
    Tensors results(1);
    if (forward.arguments.any_gradient()) {
      results[0] =
          in_backward([&] { return start_autograd(forward.arguments.inverse(forward.with_zeros(gradients))); });
    }
    append_local_gradients(results, gradients, forward.arguments);
    return results;
  }
};

/// Autograd functions of C++ know neither torch's function transforms (torch.func) nor tangents, which they would drop.
void refuse_transforms(const ExchangeArguments& arguments) {
  constexpr c10::DispatchKeySet kTransforms{c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                                            c10::DispatchKey::VmapMode};  // of torch.autograd.grad's is_grads_batched
  const bool transformed = c10::impl::tls_local_dispatch_key_set().included_.has_any(kTransforms);
  const auto has_tangent = [](const at::Tensor& tensor) { return tensor._fw_grad(/*level=*/0).defined(); };
  const bool dual =
      std::ranges::any_of(arguments.tensors, has_tangent) || std::ranges::any_of(arguments.local, has_tangent);
  if (!transformed && !dual) return;
  CommGroup::find(arguments.group)->watchdog().guard([&] {
    throw ArgumentError(text(arguments.label(), ": got tensors ",
                             transformed ? "inside torch.func or vmap" : "with tangents",
                             ", expected plain ones: take gradients one by one, by backward() or torch.autograd.grad"));
  });
}

bool any_requires_grad(at::TensorList tensors) {
  return at::GradMode::is_enabled() &&
         std::ranges::any_of(tensors, [](const at::Tensor& tensor) { return tensor.requires_grad(); });
}

Tensors exchange_with_gradients(ExchangeArguments arguments) {
  refuse_transforms(arguments);
  if (arguments.any_gradient() || any_requires_grad(arguments.local)) {
    Tensors inputs = arguments.tensors;
    inputs.insert(inputs.end(), arguments.local.begin(), arguments.local.end());
    return ExchangeFunction::apply(at::TensorList(inputs), arguments);
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return call_exchange(arguments);
}

/// Returns the tensor that stands for what is in flight, then the rows that do not travel.
Tensors start_with_gradients(ExchangeArguments arguments) {
  refuse_transforms(arguments);
  if (arguments.any_gradient()) {
    return StartFunction::apply(at::TensorList(arguments.tensors), arguments);
  }
  Tensors results = arguments.local_rows();
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  results.insert(results.begin(), call_start(arguments));
  return results;
}

Tensors exchange_autograd(ExchangeArguments arguments) {
  arguments.add_gradients();
  return exchange_with_gradients(std::move(arguments));
}

at::Tensor start_autograd(ExchangeArguments arguments) {
  arguments.add_gradients();
  return start_with_gradients(std::move(arguments))[0];
}

Tensors finish_autograd(const at::Tensor& started, at::TensorList local) {
  if (started.requires_grad() || any_requires_grad(local)) return FinishFunction::apply(started, local);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return call_finish(started, local.vec());
}

}  // namespace

// Here, beside exchange(): whoever links exchange() gets the registration with it, also from a static library.
TORCH_LIBRARY(knapformer, library) {
  // The host reads a step's tables, and calls other ranks. A CUDA graph would repeat the step that it recorded.
  const std::vector<at::Tag> by_host{at::Tag::cudagraph_unsafe};
  library.def(text("exchange", kSchema, " -> Tensor[]").c_str(), by_host);
  library.impl("exchange", c10::DispatchKey::CompositeExplicitAutograd, kernel<exchange_kernel>);
  library.impl("exchange", c10::DispatchKey::Autograd, kernel<exchange_autograd>);

  // What tracers are told in place of running it (python/knapformer/balancer.py).
  library.def(text("exchange_shapes", kSchema, " -> Tensor[]").c_str());
  library.impl("exchange_shapes", c10::DispatchKey::Meta, kernel<shapes_kernel>);

  library.def(text("exchange_start", kSchema, " -> Tensor").c_str(), by_host);
  library.impl("exchange_start", c10::DispatchKey::CompositeExplicitAutograd, kernel<start_kernel>);
  library.impl("exchange_start", c10::DispatchKey::Autograd, kernel<start_autograd>);

  library.def("exchange_finish(Tensor started, Tensor[] local) -> Tensor[]", by_host);
  library.impl("exchange_finish", c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(finish_kernel));
  library.impl("exchange_finish", c10::DispatchKey::Autograd, TORCH_FN(finish_autograd));
}

Tensors exchange(ExchangeArguments arguments) {
  arguments.decide_gradients();
  return exchange_with_gradients(std::move(arguments));
}

StartedExchange start_exchange(ExchangeArguments arguments) {
  arguments.decide_gradients();
  const Tensors results = start_with_gradients(std::move(arguments));
  return {.started = results[0], .local = {results.begin() + 1, results.end()}};
}

Tensors finish_exchange(const at::Tensor& started) { return call_finish(started); }

void set_raise_in_backward(void (*raise)(const Error& error)) { raise_as_told = raise; }

void raise_in_backward(const Error& error) {
  if (auto* raise = raise_as_told.load()) raise(error);
}

}  // namespace knapformer
