#include "knapformer/torch/exchange.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "knapformer/core/error.h"
#include "knapformer/torch/pending_exchange.h"

namespace knapformer {
namespace {

constexpr const char* kArguments =
    "(Tensor[] tensors, Tensor[] send, Tensor[] recv, int[] region_sizes, int[] head_roles, int[] head_sharing, "
    "int num_heads, int num_kv_heads, int[] differentiable, str channel, str label)";

using Tensors = std::vector<at::Tensor>;
using torch::autograd::AutogradContext;

/// A function of the dispatcher's signature from one of an ExchangeRequest.
template <auto kCall>
auto with_request(at::TensorList tensors, at::TensorList send, at::TensorList recv, at::IntArrayRef region_sizes,
                  at::IntArrayRef head_roles, at::IntArrayRef head_sharing, int64_t num_heads, int64_t num_kv_heads,
                  at::IntArrayRef differentiable, std::string_view channel, std::string_view label) {
  ExchangeRequest request;
  request.tensors = tensors.vec();
  request.send = send.vec();
  request.recv = recv.vec();
  request.region_sizes = region_sizes.vec();
  request.head_roles = head_roles.vec();
  request.head_sharing = head_sharing.vec();
  request.heads = {.num_heads = num_heads, .num_kv_heads = num_kv_heads};
  request.differentiable = differentiable.vec();
  request.channel = channel;
  request.label = label;
  return kCall(std::move(request));
}

template <class Result>
Result call_op(const char* name, const ExchangeRequest& r) {
  const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow(name, "")
          .typed<Result(at::TensorList, at::TensorList, at::TensorList, at::IntArrayRef, at::IntArrayRef,
                        at::IntArrayRef, int64_t, int64_t, at::IntArrayRef, std::string_view, std::string_view)>();
  return op.call(r.tensors, r.send, r.recv, r.region_sizes, r.head_roles, r.head_sharing, r.heads.num_heads,
                 r.heads.num_kv_heads, r.differentiable, r.channel, r.label);
}

Tensors call_exchange(const ExchangeRequest& r) { return call_op<Tensors>("knapformer::exchange", r); }
at::Tensor call_start(const ExchangeRequest& r) { return call_op<at::Tensor>("knapformer::exchange_start", r); }

Tensors call_finish(const at::Tensor& started) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("knapformer::exchange_finish", "")
                             .typed<Tensors(const at::Tensor&)>();
  return op.call(started);
}

/// A request that autograd keeps for the backward, and need not look into.
struct KeptRequest : torch::CustomClassHolder {
  explicit KeptRequest(ExchangeRequest kept) : request(std::move(kept)) {}
  ExchangeRequest request;  // without its tensors
};

void keep(AutogradContext& context, ExchangeRequest request) {
  request.tensors.clear();
  context.saved_data["request"] = c10::IValue::make_capsule(c10::make_intrusive<KeptRequest>(std::move(request)));
}

const ExchangeRequest& kept(AutogradContext& context) {
  // The context holds it for longer than this reference lives.
  return static_cast<const KeptRequest&>(*context.saved_data["request"].toCapsule()).request;
}

void mark_fixed(AutogradContext& context, const Tensors& outputs, const std::vector<int64_t>& differentiable) {
  Tensors fixed;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (differentiable[i] == 0) fixed.push_back(outputs[i]);
  }
  context.mark_non_differentiable(fixed);
}

/// An exchange in flight, as a tensor: one without bytes on the device of those that travel, whose storage owns it. On
/// their device, so that autograd runs both halves of a backward in the order and on the stream of what is between.
struct InFlight {
  ExchangeRequest request;  // without its tensors
  PendingExchange pending;
};

void delete_in_flight(void* in_flight) { delete static_cast<InFlight*>(in_flight); }

InFlight& in_flight_of(const at::Tensor& started) {
  auto* in_flight = started.storage().data_ptr().cast_context<InFlight>(&delete_in_flight);
  if (in_flight == nullptr) throw ArgumentError("started: got a tensor that exchange_start did not return");
  return *in_flight;
}

PendingExchange start(const ExchangeRequest& request) {
  return PendingExchange::start(request.arguments(), request.differentiable, Channel::find(request.channel),
                                request.label);
}

Tensors exchange_kernel(const ExchangeRequest& request) { return start(request).finish(); }

at::Tensor start_kernel(ExchangeRequest request) {
  PendingExchange pending = start(request);
  const at::Device device = request.tensors[0].device();
  request.tensors.clear();
  at::Tensor started = at::empty({0}, at::TensorOptions().dtype(at::kFloat).device(device));
  auto* in_flight = new InFlight{.request = std::move(request), .pending = std::move(pending)};
  started.storage().set_data_ptr_noswap({nullptr, in_flight, &delete_in_flight, device});
  return started;
}

Tensors finish_kernel(const at::Tensor& started) { return in_flight_of(started).pending.finish(); }

Tensors exchange_meta(const ExchangeRequest& request) {
  Tensors outputs;
  const auto shapes = ExchangeCall::output_shapes(request.arguments());
  for (size_t i = 0; i < shapes.size(); ++i) {
    outputs.push_back(at::empty_symint(shapes[i], request.tensors[i].options()));
  }
  return outputs;
}

class ExchangeFunction : public torch::autograd::Function<ExchangeFunction> {
 public:
  static Tensors forward(AutogradContext* context, at::TensorList, const ExchangeRequest& request) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    Tensors outputs = call_exchange(request);
    mark_fixed(*context, outputs, request.differentiable);
    keep(*context, request);
    return outputs;
  }

  static Tensors backward(AutogradContext* context, const Tensors& gradients) {
    const ExchangeRequest& request = kept(*context);
    Tensors results = request.gradients_from(call_exchange(request.backward(gradients)));
    results.emplace_back();  // of the request
    return results;
  }
};

class StartFunction : public torch::autograd::Function<StartFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, at::TensorList, const ExchangeRequest& request) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    keep(*context, request);
    return call_start(request);
  }

  static Tensors backward(AutogradContext* context, const Tensors& started) {
    Tensors results = kept(*context).gradients_from(call_finish(started[0]));
    results.emplace_back();
    return results;
  }
};

class FinishFunction : public torch::autograd::Function<FinishFunction> {
 public:
  static Tensors forward(AutogradContext* context, const at::Tensor& started) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const ExchangeRequest& request = in_flight_of(started).request;
    Tensors outputs = call_finish(started);
    mark_fixed(*context, outputs, request.differentiable);
    keep(*context, request);
    return outputs;
  }

  static Tensors backward(AutogradContext* context, const Tensors& gradients) {
    return {call_start(kept(*context).backward(gradients))};
  }
};

Tensors exchange_autograd(const ExchangeRequest& request) {
  if (request.any_differentiable()) return ExchangeFunction::apply(at::TensorList(request.tensors), request);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return call_exchange(request);
}

at::Tensor start_autograd(const ExchangeRequest& request) {
  if (request.any_differentiable()) return StartFunction::apply(at::TensorList(request.tensors), request);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return call_start(request);
}

Tensors finish_autograd(const at::Tensor& started) {
  if (started.requires_grad()) return FinishFunction::apply(started);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return call_finish(started);
}

}  // namespace

// Here, beside exchange(): whoever links exchange() gets the registration with it, also from a static library.
TORCH_LIBRARY(knapformer, library) {
  library.def(text("exchange", kArguments, " -> Tensor[]").c_str());
  library.impl("exchange", c10::DispatchKey::CompositeExplicitAutograd, with_request<exchange_kernel>);
  library.impl("exchange", c10::DispatchKey::Meta, with_request<exchange_meta>);
  library.impl("exchange", c10::DispatchKey::Autograd, with_request<exchange_autograd>);

  library.def(text("exchange_start", kArguments, " -> Tensor").c_str());
  library.impl("exchange_start", c10::DispatchKey::CompositeExplicitAutograd, with_request<start_kernel>);
  library.impl("exchange_start", c10::DispatchKey::Autograd, with_request<start_autograd>);

  library.def("exchange_finish(Tensor started) -> Tensor[]");
  library.impl("exchange_finish", c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(finish_kernel));
  library.impl("exchange_finish", c10::DispatchKey::Autograd, TORCH_FN(finish_autograd));
}

std::vector<at::Tensor> exchange(const std::vector<RegionInput>& regions, HeadCounts heads, Channel& channel,
                                 const std::string& label) {
  return call_exchange(ExchangeRequest::make(regions, heads, channel, label));
}

at::Tensor start_exchange(const std::vector<RegionInput>& regions, HeadCounts heads, Channel& channel,
                          const std::string& label) {
  return call_start(ExchangeRequest::make(regions, heads, channel, label));
}

std::vector<at::Tensor> finish_exchange(const at::Tensor& started) { return call_finish(started); }

}  // namespace knapformer
