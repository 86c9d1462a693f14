#include "knapformer/torch/exchange/exchange.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>

#include "knapformer/core/util/error.h"
#include "knapformer/torch/comm/comm_group.h"
#include "knapformer/torch/exchange/call.h"

namespace knapformer {

using Tensors = std::vector<at::Tensor>;

// The op's schema: ExchangeArguments <-> the dispatcher's arguments.

static constexpr size_t kTables = 4;  // tensors of a segment's table

OpArguments::OpArguments(const ExchangeArguments& a)
    : layout{static_cast<int64_t>(a.segments.size())}, names{a.group, a.call} {
  tables.reserve(kTables * a.segments.size());
  for (const auto& [table, roles, sharing] : a.segments) {
    tables.insert(tables.end(), {table.send.table, table.send.index, table.recv.table, table.recv.index});
    layout.insert(layout.end(), {sharing.shared_end, sharing.degree, sharing.index_in_group, sharing.query_parts,
                                 static_cast<int64_t>(roles.size())});
    for (const HeadRole role : roles) layout.push_back(static_cast<int64_t>(role));
  }
  names.insert(names.end(), a.names.begin(), a.names.end());
}

namespace {

constexpr const char* kSchema =
    "(Tensor[] tensors, int[] differentiable, int[] heads, Tensor[] tables, int[] layout, str[] names)";

using Names = at::ArrayRef<std::string>;

template <class Result>
using OpSignature = Result(at::TensorList, at::IntArrayRef, at::IntArrayRef, at::TensorList, at::IntArrayRef, Names);

ExchangeArguments arguments_from(at::TensorList tensors, at::IntArrayRef differentiable, at::IntArrayRef heads,
                                 at::TensorList tables, at::IntArrayRef layout, Names names) {
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
                              .differentiable = differentiable.vec(),
                              .group = names[0],
                              .call = names[1],
                              .names = names.slice(2).vec()};
  arguments.segments.resize(static_cast<size_t>(take(0, static_cast<int64_t>(tables.size() / kTables))));
  size_t num_tensors = 0, first_table = 0;
  for (SegmentArguments& segment : arguments.segments) {
    const at::Tensor* t = &tables[std::exchange(first_table, first_table + kTables)];
    segment.table = {.send = {.table = t[0], .index = t[1]}, .recv = {.table = t[2], .index = t[3]}};
    segment.sharing = {.shared_end = static_cast<HeadSharing::End>(take(0, HeadSharing::kRecv)),
                       .degree = static_cast<int32_t>(take(1, kAny)),
                       .index_in_group = static_cast<int32_t>(take(0, kAny)),
                       .query_parts = static_cast<int32_t>(take(1, kAny))};
    check(segment.sharing.degree % segment.sharing.query_parts == 0, "layout");
    segment.roles.resize(static_cast<size_t>(take(1, kAny)));
    for (HeadRole& role : segment.roles) {
      role = static_cast<HeadRole>(take(0, heads[0] < 1 ? 0 : static_cast<int64_t>(HeadRole::kValue)));
    }
    num_tensors += segment.roles.size();
  }
  check(next == layout.end() && num_tensors == tensors.size(), "layout");
  check(arguments.names.empty() || arguments.names.size() == num_tensors, "names");
  return arguments;
}

/// Makes a function of the dispatcher's signature from one that takes ExchangeArguments.
template <auto kCall>
auto kernel(at::TensorList tensors, at::IntArrayRef differentiable, at::IntArrayRef heads, at::TensorList tables,
            at::IntArrayRef layout, Names names) {
  return kCall(arguments_from(tensors, differentiable, heads, tables, layout, names));
}

template <class Result>
Result call_op(const c10::TypedOperatorHandle<OpSignature<Result>>& op, const ExchangeArguments& a) {
  const OpArguments of_op(a);
  const int64_t heads[] = {a.heads.num_heads, a.heads.num_kv_heads};
  return op.call(a.tensors, a.differentiable, heads, of_op.tables, of_op.layout, of_op.names);
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

Tensors call_finish(const at::Tensor& started) {
  static const auto op = find_op<Tensors(const at::Tensor&)>("knapformer::exchange_finish");
  return op.call(started);
}

/// An exchange between its start and its finish.
///
/// To autograd it is a tensor: one without bytes, whose storage owns it. It is on the device of what travels, so that
/// autograd runs both halves of a backward in the order and on the stream of what is between them.
class InFlight {
 public:
  /// Packs, and launches the all-to-all. Collective.
  explicit InFlight(const ExchangeArguments& arguments) : group_(CommGroup::find(arguments.group)) {
    RECORD_USER_SCOPE(text("knapformer::start ", arguments.label()));
    group_->watchdog().guard([&] {
      call_ = std::make_unique<ExchangeCall>(arguments);
      call_->pack();
      // The last step before the collective, as ranks look for errors in it. While a backend opens connections, which
      // it does in a group's first collective, they do not.
      group_->fingerprints().agree(arguments.fingerprint());
      at::Tensor received = call_->received(), sent = call_->sent();
      work_ = group_->start_all_to_all(received, sent, call_->received_bytes(), call_->sent_bytes(), call_->label());
      call_->move_own();
    });
  }

  /// The same; the tensor that stands for it.
  static at::Tensor start(ExchangeArguments arguments) {
    const at::Device device = arguments.tensors.at(0).device();
    auto* in_flight = new InFlight(arguments);
    arguments.tensors.clear();
    in_flight->arguments_ = std::move(arguments);
    at::Tensor started = at::empty({0}, at::TensorOptions().dtype(at::kFloat).device(device));
    started.storage().set_data_ptr_noswap({nullptr, in_flight, &delete_it, device});
    return started;
  }

  /// What such a tensor stands for. Throws StateError, ArgumentError where it stands for nothing.
  static InFlight& of(const at::Tensor& started) {
    if (!started.defined()) throw StateError("exchange_start: got no gradient of what it started, expected one");
    auto* in_flight = started.storage().data_ptr().cast_context<InFlight>(&delete_it);
    if (in_flight == nullptr) throw ArgumentError("started: got a tensor that exchange_start did not return");
    return *in_flight;
  }

  /// Waits and unpacks; once.
  Tensors finish() {
    return group_->watchdog().guard([&] {
      if (!call_) throw StateError(text(arguments_.label(), ": has been finished before, expected once"));
      const std::unique_ptr<ExchangeCall> call = std::move(call_);
      group_->wait(*work_, call->device(), call->label());
      work_.reset();
      return call->unpack();
    });
  }

  /// Of one that start() made, without its tensors.
  const ExchangeArguments& arguments() const { return arguments_; }

 private:
  static void delete_it(void* in_flight) { delete static_cast<InFlight*>(in_flight); }

  std::shared_ptr<CommGroup> group_;
  ExchangeArguments arguments_;
  std::unique_ptr<ExchangeCall> call_;
  WorkPtr work_;
};

Tensors exchange_kernel(const ExchangeArguments& arguments) { return InFlight(arguments).finish(); }

at::Tensor start_kernel(ExchangeArguments arguments) { return InFlight::start(std::move(arguments)); }

Tensors finish_kernel(const at::Tensor& started) { return InFlight::of(started).finish(); }

using torch::autograd::AutogradContext;

/// Arguments that autograd keeps for the backward, without looking into them.
struct KeptArguments : torch::CustomClassHolder {
  explicit KeptArguments(ExchangeArguments kept)
      : arguments(std::move(kept)), group(CommGroup::find_if_alive(arguments.group)) {
    arguments.tensors.clear();
  }
  /// Puts zeros for gradients that the backward pass did not bring; outputs whose gradient does not travel get none.
  Tensors with_zeros(Tensors gradients) const {
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (gradients[i].defined() || arguments.differentiable[i] == 0) continue;
      gradients[i] = at::zeros_symint(outputs[i].first, outputs[i].second);
    }
    return gradients;
  }

  ExchangeArguments arguments;
  std::vector<std::pair<c10::SymDimVector, at::TensorOptions>> outputs;  // where known: empty for a start
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

/// Returns the outputs of a forward, and keeps all that its backward needs.
Tensors kept_outputs(AutogradContext& context, Tensors outputs, ExchangeArguments arguments) {
  Tensors fixed;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (arguments.differentiable[i] == 0) fixed.push_back(outputs[i]);
  }
  if (!fixed.empty()) context.mark_non_differentiable(fixed);
  context.set_materialize_grads(false);  // with_zeros makes those that are needed
  KeptArguments& kept = keep_arguments(context, std::move(arguments));
  for (const at::Tensor& output : outputs) kept.outputs.emplace_back(output.sym_sizes(), output.options());
  return outputs;
}

Tensors exchange_with_gradients(ExchangeArguments arguments);
at::Tensor start_autograd(ExchangeArguments arguments);

class ExchangeFunction : public torch::autograd::Function<ExchangeFunction> {
 public:
  static Tensors forward(AutogradContext* context, at::TensorList, ExchangeArguments& arguments) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    Tensors outputs = call_exchange(arguments);
    return kept_outputs(*context, std::move(outputs), std::move(arguments));
  }

  static Tensors backward(AutogradContext* context, const Tensors& gradients) {
    const KeptArguments& forward = kept_by(*context);
    Tensors results = in_backward([&] {
      return forward.arguments.gradients_from(
          exchange_with_gradients(forward.arguments.inverse(forward.with_zeros(gradients))));
    });
    results.emplace_back();  // for the arguments, which have no gradient
    return results;
  }
};

class StartFunction : public torch::autograd::Function<StartFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, at::TensorList, ExchangeArguments& arguments) {
    context->set_materialize_grads(false);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    at::Tensor started = call_start(arguments);
    keep_arguments(*context, std::move(arguments));
    return started;
  }

  static Tensors backward(AutogradContext* context, const Tensors& gradients) {
    const KeptArguments& forward = kept_by(*context);
    Tensors results = in_backward([&] { return forward.arguments.gradients_from(call_finish(gradients[0])); });
    results.emplace_back();
    return results;
  }
};

class FinishFunction : public torch::autograd::Function<FinishFunction> {
 public:
  static Tensors forward(AutogradContext* context, const at::Tensor& started) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return kept_outputs(*context, call_finish(started), InFlight::of(started).arguments());
  }

  static Tensors backward(AutogradContext* context, const Tensors& gradients) {
    const KeptArguments& forward = kept_by(*context);
    return {in_backward([&] { return start_autograd(forward.arguments.inverse(forward.with_zeros(gradients))); })};
  }
};

/// Autograd functions of C++ know neither torch's function transforms (torch.func) nor tangents, which they would drop.
void refuse_transforms(const ExchangeArguments& arguments) {
  constexpr c10::DispatchKeySet kTransforms{c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                                            c10::DispatchKey::VmapMode};  // of torch.autograd.grad's is_grads_batched
  const bool transformed = c10::impl::tls_local_dispatch_key_set().included_.has_any(kTransforms);
  const auto has_tangent = [](const at::Tensor& tensor) { return tensor._fw_grad(/*level=*/0).defined(); };
  const bool dual = std::ranges::any_of(arguments.tensors, has_tangent);
  if (!transformed && !dual) return;
  CommGroup::find(arguments.group)->watchdog().guard([&] {
    throw ArgumentError(text(arguments.label(), ": got tensors ",
                             transformed ? "inside torch.func or vmap" : "with tangents",
                             ", expected plain ones: take gradients one by one, by backward() or torch.autograd.grad"));
  });
}

/// Calls the op, by its autograd function where a gradient travels.
template <class Function, class Call>
auto by_autograd(ExchangeArguments arguments, Call call) {
  refuse_transforms(arguments);
  if (arguments.any_gradient()) return Function::apply(at::TensorList(arguments.tensors), arguments);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return call(arguments);
}

Tensors exchange_with_gradients(ExchangeArguments arguments) {
  return by_autograd<ExchangeFunction>(std::move(arguments), call_exchange);
}

at::Tensor start_with_gradients(ExchangeArguments arguments) {
  return by_autograd<StartFunction>(std::move(arguments), call_start);
}

Tensors exchange_autograd(ExchangeArguments arguments) {
  arguments.add_gradients();
  return exchange_with_gradients(std::move(arguments));
}

at::Tensor start_autograd(ExchangeArguments arguments) {
  arguments.add_gradients();
  return start_with_gradients(std::move(arguments));
}

Tensors finish_autograd(const at::Tensor& started) {
  if (started.requires_grad()) return FinishFunction::apply(started);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return call_finish(started);
}

}  // namespace

// Here, beside exchange(): whoever links exchange() gets the registration with it, also from a static library.
TORCH_LIBRARY(knapformer, library) {
  // The host reads a step's tables, and calls other ranks. A CUDA graph would repeat the step that it recorded.
  const std::vector<at::Tag> by_host{at::Tag::cudagraph_unsafe};
  library.def(text("exchange", kSchema, " -> Tensor[]").c_str(), by_host);
  library.impl("exchange", c10::DispatchKey::CompositeExplicitAutograd, kernel<exchange_kernel>);
  library.impl("exchange", c10::DispatchKey::Autograd, kernel<exchange_autograd>);

  library.def(text("exchange_start", kSchema, " -> Tensor").c_str(), by_host);
  library.impl("exchange_start", c10::DispatchKey::CompositeExplicitAutograd, kernel<start_kernel>);
  library.impl("exchange_start", c10::DispatchKey::Autograd, kernel<start_autograd>);

  library.def("exchange_finish(Tensor started) -> Tensor[]", by_host);
  library.impl("exchange_finish", c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(finish_kernel));
  library.impl("exchange_finish", c10::DispatchKey::Autograd, TORCH_FN(finish_autograd));
}

Tensors exchange(ExchangeArguments arguments) {
  arguments.decide_gradients();
  return exchange_with_gradients(std::move(arguments));
}

at::Tensor start_exchange(ExchangeArguments arguments) {
  arguments.decide_gradients();
  return start_with_gradients(std::move(arguments));
}

Tensors finish_exchange(const at::Tensor& started) { return call_finish(started); }

}  // namespace knapformer
