#include "knapformer/torch/exchange/exchange.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "knapformer/core/util/error.h"
#include "knapformer/torch/comm/comm_group.h"
#include "knapformer/torch/exchange/exchange_buffer.h"

namespace knapformer {
namespace {

/// The arguments of a call, to the dispatcher and to autograd an object into which they do not look.
struct CallObject : torch::CustomClassHolder {
  explicit CallObject(ExchangeArguments of_call) : arguments(std::move(of_call)) {}

  ExchangeArguments arguments;  // with the group, so that the backward needs no balancer
  std::vector<std::pair<at::DimVector, at::TensorOptions>> outputs;  // their shapes, once something keeps them
};
using CallPtr = c10::intrusive_ptr<CallObject>;

template <class Signature>
c10::TypedOperatorHandle<Signature> find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

Tensors call_exchange(at::TensorList tensors, const CallPtr& call) {
  static const auto op = find_op<Tensors(at::TensorList, const CallPtr&)>("knapformer::exchange");
  return op.call(tensors, call);
}

at::Tensor call_start(at::TensorList tensors, const CallPtr& call) {
  static const auto op = find_op<at::Tensor(at::TensorList, const CallPtr&)>("knapformer::exchange_start");
  return op.call(tensors, call);
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
  InFlight(at::TensorList tensors, CallPtr call) : call_(std::move(call)), group_(call_->arguments.group) {
    RECORD_USER_SCOPE(text("knapformer::start ", call_->arguments.label()));
    group_->peer_errors().guard([&] {
      buffer_ = std::make_unique<ExchangeBuffer>(tensors, call_->arguments);
      buffer_->pack();
      // The last step before the collective, as ranks look for errors in it. While a backend opens connections, which
      // it does in a group's first collective, they do not.
      group_->fingerprints().agree(call_->arguments.fingerprint(tensors));
      at::Tensor received = buffer_->received(), sent = buffer_->sent();
      work_ =
          group_->start_all_to_all(received, sent, buffer_->received_bytes(), buffer_->sent_bytes(), buffer_->label());
      buffer_->move_own();
    });
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
    return group_->peer_errors().guard([&] {
      if (!buffer_) throw StateError(text(call_->arguments.label(), ": has been finished before, expected once"));
      const std::unique_ptr<ExchangeBuffer> buffer = std::move(buffer_);
      group_->wait(*work_, buffer->device(), buffer->label());
      work_.reset();
      return buffer->unpack();
    });
  }

  const CallPtr& call() const { return call_; }
  static void delete_it(void* in_flight) { delete static_cast<InFlight*>(in_flight); }

 private:
  CallPtr call_;
  std::shared_ptr<CommGroup> group_;
  std::unique_ptr<ExchangeBuffer> buffer_;
  WorkPtr work_;
};

Tensors exchange_kernel(at::TensorList tensors, const CallPtr& call) { return InFlight(tensors, call).finish(); }

at::Tensor start_kernel(at::TensorList tensors, const CallPtr& call) {
  const at::Device device = tensors[0].device();
  auto in_flight = std::make_unique<InFlight>(tensors, call);
  at::Tensor started = at::empty({0}, at::TensorOptions().dtype(at::kFloat).device(device));
  started.storage().set_data_ptr_noswap({nullptr, in_flight.release(), &InFlight::delete_it, device});
  return started;
}

Tensors finish_kernel(const at::Tensor& started) { return InFlight::of(started).finish(); }

using torch::autograd::AutogradContext;

void keep_call(AutogradContext& context, const CallPtr& call) {
  context.set_materialize_grads(false);  // exchange_back makes those that are needed
  context.saved_data["call"] = c10::IValue::make_capsule(call);
}

CallPtr kept_call(AutogradContext& context) {
  return c10::static_intrusive_pointer_cast<CallObject>(context.saved_data["call"].toCapsule());
}

/// Returns the outputs of a forward, and keeps all that its backward needs.
Tensors kept_outputs(AutogradContext& context, Tensors outputs, const CallPtr& call) {
  Tensors fixed;
  call->outputs.clear();
  for (size_t i = 0; i < outputs.size(); ++i) {
    call->outputs.emplace_back(outputs[i].sizes(), outputs[i].options());
    if (!call->arguments.differentiable[i]) fixed.push_back(outputs[i]);
  }
  if (!fixed.empty()) context.mark_non_differentiable(fixed);
  keep_call(context, call);
  return outputs;
}

/// Calls run_exchange or start_exchange for the gradients of a forward's outputs, with zeros for those that the
/// backward pass did not bring.
auto exchange_back(const CallObject& forward, const Tensors& gradients, auto call) {
  return in_backward([&] {
    Tensors travelling;
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (!forward.arguments.differentiable[i]) continue;
      const auto& [shape, options] = forward.outputs[i];
      travelling.push_back(gradients[i].defined() ? gradients[i] : at::zeros(shape, options));
    }
    ExchangeArguments back = forward.arguments.inverse();
    if (at::GradMode::is_enabled()) back.follow_other_levels(travelling);
    return call(travelling, std::move(back));
  });
}

/// The gradient of each input of a forward, from the outputs of exchange_back. Undefined where none travels, and for
/// the call, which is the last input.
Tensors gradients_from(const CallObject& forward, const Tensors& moved) {
  const std::vector<bool>& travels = forward.arguments.differentiable;
  Tensors gradients(travels.size() + 1);
  for (size_t i = 0, next = 0; i < travels.size(); ++i) {
    if (travels[i]) gradients[i] = moved[next++];
  }
  return gradients;
}

struct ExchangeFunction : torch::autograd::Function<ExchangeFunction> {
  static Tensors forward(AutogradContext* context, at::TensorList tensors, const CallPtr& call) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return kept_outputs(*context, call_exchange(tensors, call), call);
  }

  static Tensors backward(AutogradContext* context, const Tensors& gradients) {
    const CallPtr forward = kept_call(*context);
    return gradients_from(*forward, exchange_back(*forward, gradients, run_exchange));
  }
};

struct StartFunction : torch::autograd::Function<StartFunction> {
  static at::Tensor forward(AutogradContext* context, at::TensorList tensors, const CallPtr& call) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    keep_call(*context, call);
    return call_start(tensors, call);
  }

  static Tensors backward(AutogradContext* context, const Tensors& gradients) {
    return gradients_from(*kept_call(*context), in_backward([&] { return finish_exchange(gradients[0]); }));
  }
};

struct FinishFunction : torch::autograd::Function<FinishFunction> {
  static Tensors forward(AutogradContext* context, const at::Tensor& started) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return kept_outputs(*context, call_finish(started), InFlight::of(started).call());
  }

  static Tensors backward(AutogradContext* context, const Tensors& gradients) {
    return {exchange_back(*kept_call(*context), gradients, start_exchange)};
  }
};

/// Autograd functions of C++ know neither torch's function transforms (torch.func) nor tangents, which they would drop.
void refuse_transforms(const Tensors& tensors, const ExchangeArguments& arguments) {
  constexpr c10::DispatchKeySet kTransforms{c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                                            c10::DispatchKey::VmapMode};  // of torch.autograd.grad's is_grads_batched
  const bool transformed = c10::impl::tls_local_dispatch_key_set().included_.has_any(kTransforms);
  const auto has_tangent = [](const at::Tensor& tensor) { return tensor._fw_grad(/*level=*/0).defined(); };
  if (!transformed && std::ranges::none_of(tensors, has_tangent)) return;
  arguments.group->peer_errors().guard([&] {
    throw ArgumentError(text(arguments.label(), ": got tensors ",
                             transformed ? "inside torch.func or vmap" : "with tangents",
                             ", expected plain ones: take gradients one by one, by backward() or torch.autograd.grad"));
  });
}

/// Decides which gradients travel. Calls the op, by its autograd function where one does.
template <class Function>
auto by_autograd(const Tensors& tensors, ExchangeArguments arguments, auto op) {
  refuse_transforms(tensors, arguments);
  if (at::GradMode::is_enabled()) {
    for (const at::Tensor& tensor : tensors) arguments.differentiable.push_back(tensor.requires_grad());
  }
  const auto call = c10::make_intrusive<CallObject>(std::move(arguments));
  if (std::ranges::count(call->arguments.differentiable, true) > 0)
    return Function::apply(at::TensorList(tensors), call);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return op(tensors, call);
}

}  // namespace

// Here, beside run_exchange(): whoever links that gets the registration with it, also from a static library.
TORCH_LIBRARY(knapformer, library) {
  // The host reads a step's tables, and calls other ranks. A CUDA graph would repeat the step that it recorded.
  const std::vector<at::Tag> by_host{at::Tag::cudagraph_unsafe};
  constexpr auto kAnyDevice = c10::DispatchKey::CompositeExplicitAutograd;
  library.class_<CallObject>("ExchangeCall");
  library.def("exchange(Tensor[] tensors, __torch__.torch.classes.knapformer.ExchangeCall call) -> Tensor[]", by_host);
  library.def("exchange_start(Tensor[] tensors, __torch__.torch.classes.knapformer.ExchangeCall call) -> Tensor",
              by_host);
  library.def("exchange_finish(Tensor started) -> Tensor[]", by_host);
  library.impl("exchange", kAnyDevice, exchange_kernel);
  library.impl("exchange_start", kAnyDevice, start_kernel);
  library.impl("exchange_finish", kAnyDevice, finish_kernel);
}

Tensors run_exchange(const Tensors& tensors, ExchangeArguments arguments) {
  return by_autograd<ExchangeFunction>(tensors, std::move(arguments), call_exchange);
}

at::Tensor start_exchange(const Tensors& tensors, ExchangeArguments arguments) {
  return by_autograd<StartFunction>(tensors, std::move(arguments), call_start);
}

Tensors finish_exchange(const at::Tensor& started) {
  static_cast<void>(InFlight::of(started));  // throws for another tensor
  if (started.requires_grad()) return FinishFunction::apply(started);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return call_finish(started);
}

}  // namespace knapformer
