#include "knapformer/torch/exchange.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <ranges>

#include "knapformer/torch/pending_exchange.h"

namespace knapformer {
namespace {

constexpr const char* kSchema =
    "exchange(Tensor[] tensors, Tensor[] send, Tensor[] recv, int[] region_sizes, int[] head_roles, int[] "
    "head_sharing, int num_heads, "
    "int num_kv_heads, int[] differentiable, str channel, str label) -> Tensor[]";

using Tensors = std::vector<at::Tensor>;

Tensors exchange_kernel(at::TensorList tensors, at::TensorList send, at::TensorList recv, at::IntArrayRef region_sizes,
                        at::IntArrayRef head_roles, at::IntArrayRef head_sharing, int64_t num_heads,
                        int64_t num_kv_heads, at::IntArrayRef differentiable, std::string_view channel,
                        std::string_view label) {
  const ExchangeArguments arguments{.tensors = tensors,
                                    .send = send,
                                    .recv = recv,
                                    .region_sizes = region_sizes,
                                    .head_roles = head_roles,
                                    .head_sharing = head_sharing,
                                    .heads = {.num_heads = num_heads, .num_kv_heads = num_kv_heads}};
  return PendingExchange::start(arguments, differentiable, Channel::find(channel), std::string(label)).finish();
}

Tensors exchange_meta(at::TensorList tensors, at::TensorList send, at::TensorList recv, at::IntArrayRef region_sizes,
                      at::IntArrayRef head_roles, at::IntArrayRef head_sharing, int64_t num_heads, int64_t num_kv_heads,
                      at::IntArrayRef, std::string_view, std::string_view) {
  const ExchangeArguments arguments{.tensors = tensors,
                                    .send = send,
                                    .recv = recv,
                                    .region_sizes = region_sizes,
                                    .head_roles = head_roles,
                                    .head_sharing = head_sharing,
                                    .heads = {.num_heads = num_heads, .num_kv_heads = num_kv_heads}};
  Tensors outputs;
  const auto shapes = ExchangeCall::output_shapes(arguments);
  for (size_t i = 0; i < shapes.size(); ++i) outputs.push_back(at::empty_symint(shapes[i], tensors[i].options()));
  return outputs;
}

Tensors call_exchange(at::TensorList tensors, at::TensorList send, at::TensorList recv, at::IntArrayRef region_sizes,
                      at::IntArrayRef head_roles, at::IntArrayRef head_sharing, HeadCounts heads,
                      at::IntArrayRef differentiable, std::string_view channel, std::string_view label) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("knapformer::exchange", "")
          .typed<Tensors(at::TensorList, at::TensorList, at::TensorList, at::IntArrayRef, at::IntArrayRef,
                         at::IntArrayRef, int64_t, int64_t, at::IntArrayRef, std::string_view, std::string_view)>();
  return op.call(tensors, send, recv, region_sizes, head_roles, head_sharing, heads.num_heads, heads.num_kv_heads,
                 differentiable, channel, label);
}

bool gradient_travels(const at::Tensor& tensor) {
  return at::GradMode::is_enabled() && tensor.requires_grad() &&
         (at::isFloatingType(tensor.scalar_type()) || at::isComplexType(tensor.scalar_type()));
}

/// A rank without rows follows the others in whether gradients travel: its own tensors may have come about without any.
/// It learns it here, before autograd looks, since its backward must run where theirs does. It follows what was agreed
/// last: where ranks with rows change their minds, in the same gradient mode, that is an error.
void follow_others(Tensors& tensors, std::vector<int64_t>& differentiable, const ExchangeArguments& arguments,
                   Channel& channel, std::string_view label) {
  const Statement statement = make_statement(arguments, differentiable, label);
  if (!statement.follows) return;
  const std::string gradients = channel.board().guard([&] { return channel.agreement().foresee(statement); });
  for (size_t i = 0; i < tensors.size(); ++i) {
    const bool travels = gradients[i] == '1';
    if (travels == (differentiable[i] != 0)) continue;
    tensors[i] = tensors[i].detach();
    if (travels) tensors[i].set_requires_grad(true);
    differentiable[i] = travels;
  }
}

/// What backward needs, and autograd need not look into: hence no tensor among the arguments of ExchangeFunction but
/// the rows themselves.
struct Forward {
  at::TensorList send, recv;
  at::IntArrayRef region_sizes, head_roles, head_sharing;
  HeadCounts heads;
  at::IntArrayRef differentiable;
  std::string_view channel, label;
};

/// "route(x,ids)" -> "route(x.grad) backward", of the tensors whose gradient travels.
std::string backward_label(std::string_view label, const std::vector<int64_t>& differentiable) {
  const size_t open = label.find('('), close = label.rfind(')');
  if (open == std::string_view::npos || close == std::string_view::npos) return std::string(label) + " backward";
  std::string backward(label.substr(0, open + 1));
  std::string_view names = label.substr(open + 1, close - open - 1);
  for (const int64_t travels : differentiable) {
    const size_t comma = names.find(',');
    if (travels != 0) {
      if (backward.back() != '(') backward += ',';
      backward.append(names.substr(0, comma)).append(".grad");
    }
    names = comma == std::string_view::npos ? std::string_view() : names.substr(comma + 1);
  }
  return backward.append(label.substr(close)).append(" backward");
}

class ExchangeFunction : public torch::autograd::Function<ExchangeFunction> {
 public:
  static Tensors forward(torch::autograd::AutogradContext* context, at::TensorList tensors, const Forward& call) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    Tensors outputs = call_exchange(tensors, call.send, call.recv, call.region_sizes, call.head_roles,
                                    call.head_sharing, call.heads, call.differentiable, call.channel, call.label);
    Tensors fixed;
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (call.differentiable[i] == 0) fixed.push_back(outputs[i]);
    }
    context->mark_non_differentiable(fixed);
    context->saved_data["send"] = call.send.vec();
    context->saved_data["recv"] = call.recv.vec();
    context->saved_data["region_sizes"] = call.region_sizes.vec();
    context->saved_data["head_roles"] = call.head_roles.vec();
    context->saved_data["head_sharing"] = call.head_sharing.vec();
    context->saved_data["num_heads"] = call.heads.num_heads;
    context->saved_data["num_kv_heads"] = call.heads.num_kv_heads;
    context->saved_data["differentiable"] = call.differentiable.vec();
    context->saved_data["channel"] = std::string(call.channel);
    context->saved_data["label"] = std::string(call.label);
    return outputs;
  }

  static Tensors backward(torch::autograd::AutogradContext* context, Tensors gradients) {
    auto& saved = context->saved_data;
    const Tensors send = saved["recv"].toTensorVector(), recv = saved["send"].toTensorVector();  // swapped: the inverse
    const std::vector<int64_t> region_sizes = saved["region_sizes"].toIntVector();
    const std::vector<int64_t> head_roles = saved["head_roles"].toIntVector();
    const std::vector<int64_t> head_sharing = saved["head_sharing"].toIntVector();
    const std::vector<int64_t> differentiable = saved["differentiable"].toIntVector();

    // The tensors that are differentiable, and the regions that have any.
    Tensors tensors, send_of, recv_of;
    std::vector<int64_t> sizes_of, roles_of, sharing_of;
    constexpr size_t kTensorsPerEnd = 3;
    size_t next = 0;
    for (size_t region = 0; region < region_sizes.size(); ++region) {
      int64_t size = 0;
      for (int64_t i = 0; i < region_sizes[region]; ++i, ++next) {
        if (differentiable[next] == 0) continue;
        tensors.push_back(gradients[next]);
        roles_of.push_back(head_roles[next]);
        ++size;
      }
      if (size == 0) continue;
      sizes_of.push_back(size);
      const HeadSharing sharing = HeadSharing::from(head_sharing, region).inverse();
      sharing_of.insert(sharing_of.end(), {sharing.shared_end, sharing.degree, sharing.index_in_group});
      for (size_t i = region * kTensorsPerEnd; i < (region + 1) * kTensorsPerEnd; ++i) {
        send_of.push_back(send[i]);
        recv_of.push_back(recv[i]);
      }
    }
    std::vector<int64_t> differentiable_of;
    for (const at::Tensor& tensor : tensors) differentiable_of.push_back(gradient_travels(tensor));
    const HeadCounts heads{.num_heads = saved["num_heads"].toInt(), .num_kv_heads = saved["num_kv_heads"].toInt()};
    const std::string& channel = saved["channel"].toStringRef();
    std::string label = backward_label(saved["label"].toStringRef(), differentiable);
    if (at::GradMode::is_enabled()) {  // a backward that is differentiated itself
      label += ", differentiable";
      follow_others(tensors, differentiable_of,
                    {.tensors = tensors,
                     .send = send_of,
                     .recv = recv_of,
                     .region_sizes = sizes_of,
                     .head_roles = roles_of,
                     .head_sharing = sharing_of,
                     .heads = heads},
                    *Channel::find(channel), label);
    }
    const Tensors moved = call_exchange(tensors, send_of, recv_of, sizes_of, roles_of, sharing_of, heads,
                                        differentiable_of, channel, label);

    Tensors results(differentiable.size() + 1);  // one more: the argument beside the tensors
    for (size_t i = 0, m = 0; i < differentiable.size(); ++i) {
      if (differentiable[i] != 0) results[i] = moved[m++];
    }
    return results;
  }
};

Tensors exchange_autograd(at::TensorList tensors, at::TensorList send, at::TensorList recv,
                          at::IntArrayRef region_sizes, at::IntArrayRef head_roles, at::IntArrayRef head_sharing,
                          int64_t num_heads, int64_t num_kv_heads, at::IntArrayRef differentiable,
                          std::string_view channel, std::string_view label) {
  const HeadCounts heads{.num_heads = num_heads, .num_kv_heads = num_kv_heads};
  if (std::ranges::find(differentiable, 1) == differentiable.end()) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call_exchange(tensors, send, recv, region_sizes, head_roles, head_sharing, heads, differentiable, channel,
                         label);
  }
  return ExchangeFunction::apply(tensors, Forward{.send = send,
                                                  .recv = recv,
                                                  .region_sizes = region_sizes,
                                                  .head_roles = head_roles,
                                                  .head_sharing = head_sharing,
                                                  .heads = heads,
                                                  .differentiable = differentiable,
                                                  .channel = channel,
                                                  .label = label});
}

void append(Tensors& tensors, const EndTensors& end) {
  tensors.insert(tensors.end(), {end.table, end.rows, end.index});
}

}  // namespace

// Here, beside exchange(): whoever links exchange() gets the registration with it, also from a static library.
TORCH_LIBRARY(knapformer, library) {
  library.def(kSchema);
  library.impl("exchange", c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(exchange_kernel));
  library.impl("exchange", c10::DispatchKey::Meta, TORCH_FN(exchange_meta));
  library.impl("exchange", c10::DispatchKey::Autograd, TORCH_FN(exchange_autograd));
}

std::vector<at::Tensor> exchange(const std::vector<RegionInput>& regions, HeadCounts heads, Channel& channel,
                                 const std::string& label) {
  Tensors tensors, send, recv;
  std::vector<int64_t> sizes, roles, sharing, differentiable;
  for (const RegionInput& region : regions) {
    if (region.tensors.empty()) continue;
    sizes.push_back(static_cast<int64_t>(region.tensors.size()));
    append(send, region.table.send);
    append(recv, region.table.recv);
    sharing.insert(sharing.end(), {region.sharing.shared_end, region.sharing.degree, region.sharing.index_in_group});
    for (size_t i = 0; i < region.tensors.size(); ++i) {
      tensors.push_back(region.tensors[i]);
      roles.push_back(static_cast<int64_t>(region.roles[i]));
      differentiable.push_back(gradient_travels(region.tensors[i]));
    }
  }
  // The gradient mode is part of the call: it switches on all ranks, so a rank without rows sees it too.
  const std::string call = at::GradMode::is_enabled() ? label : label + " without gradients";
  follow_others(tensors, differentiable,
                {.tensors = tensors,
                 .send = send,
                 .recv = recv,
                 .region_sizes = sizes,
                 .head_roles = roles,
                 .head_sharing = sharing,
                 .heads = heads},
                channel, call);
  return call_exchange(tensors, send, recv, sizes, roles, sharing, heads, differentiable, channel.name(), call);
}

}  // namespace knapformer
