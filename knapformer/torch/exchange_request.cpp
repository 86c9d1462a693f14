#include "knapformer/torch/exchange_request.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>

namespace knapformer {
namespace {

bool gradient_travels(const at::Tensor& tensor) {
  return at::GradMode::is_enabled() && tensor.requires_grad() &&
         (at::isFloatingType(tensor.scalar_type()) || at::isComplexType(tensor.scalar_type()));
}

void append(std::vector<at::Tensor>& tensors, const EndTensors& end) {
  tensors.insert(tensors.end(), {end.table, end.rows, end.index});
}

void append(std::vector<int64_t>& fields, const HeadSharing& sharing) {
  fields.insert(fields.end(), {sharing.shared_end, sharing.degree, sharing.index_in_group});
}

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

}  // namespace

ExchangeArguments ExchangeRequest::arguments() const {
  return {.tensors = tensors,
          .send = send,
          .recv = recv,
          .region_sizes = region_sizes,
          .head_roles = head_roles,
          .head_sharing = head_sharing,
          .heads = heads};
}

bool ExchangeRequest::any_differentiable() const {
  return std::find(differentiable.begin(), differentiable.end(), 1) != differentiable.end();
}

ExchangeRequest ExchangeRequest::make(const std::vector<RegionInput>& regions, HeadCounts heads, Channel& channel,
                                      const std::string& label) {
  ExchangeRequest request;
  for (const RegionInput& region : regions) {
    if (region.tensors.empty()) continue;
    request.region_sizes.push_back(static_cast<int64_t>(region.tensors.size()));
    append(request.send, region.table.send);
    append(request.recv, region.table.recv);
    append(request.head_sharing, region.sharing);
    for (size_t i = 0; i < region.tensors.size(); ++i) {
      request.tensors.push_back(region.tensors[i]);
      request.head_roles.push_back(static_cast<int64_t>(region.roles[i]));
      request.differentiable.push_back(gradient_travels(region.tensors[i]));
    }
  }
  request.heads = heads;
  request.channel = channel.name();
  // The gradient mode is part of the call: it switches on all ranks, so a rank without rows sees it too.
  request.label = at::GradMode::is_enabled() ? label : label + " without gradients";
  request.follow_others(channel);
  return request;
}

/// A rank without rows follows the others in whether gradients travel: its own tensors may have come about without any.
/// It learns it here, before autograd looks, since its backward must run where theirs does. It follows what was agreed
/// last: where ranks with rows change their minds, in the same gradient mode, that is an error.
void ExchangeRequest::follow_others(Channel& own_channel) {
  // As a statement would say, which takes longer to make.
  const bool has_rows = std::ranges::any_of(tensors, [](const at::Tensor& tensor) { return tensor.size(0) > 0; });
  if (has_rows || !at::GradMode::is_enabled()) return;
  const Statement statement = make_statement(arguments(), differentiable, label);
  const std::string gradients = own_channel.board().guard([&] { return own_channel.agreement().foresee(statement); });
  for (size_t i = 0; i < tensors.size(); ++i) {
    const bool travels = gradients[i] == '1';
    if (travels == (differentiable[i] != 0)) continue;
    tensors[i] = tensors[i].detach();
    if (travels) tensors[i].set_requires_grad(true);
    differentiable[i] = travels;
  }
}

ExchangeRequest ExchangeRequest::backward(const std::vector<at::Tensor>& gradients) const {
  ExchangeRequest inverse;
  size_t next = 0;
  for (size_t region = 0; region < region_sizes.size(); ++region) {
    int64_t size = 0;
    for (int64_t i = 0; i < region_sizes[region]; ++i, ++next) {
      if (differentiable[next] == 0) continue;
      inverse.tensors.push_back(gradients[next]);
      inverse.head_roles.push_back(head_roles[next]);
      inverse.differentiable.push_back(gradient_travels(gradients[next]));
      ++size;
    }
    if (size == 0) continue;
    inverse.region_sizes.push_back(size);
    append(inverse.head_sharing, HeadSharing::from(head_sharing, region).inverse());
    for (size_t i = region * kTensorsPerEnd; i < (region + 1) * kTensorsPerEnd; ++i) {
      inverse.send.push_back(recv[i]);
      inverse.recv.push_back(send[i]);
    }
  }
  inverse.heads = heads;
  inverse.channel = channel;
  inverse.label = backward_label(label, differentiable);
  if (at::GradMode::is_enabled()) {  // a backward that is differentiated itself
    inverse.label += ", differentiable";
    inverse.follow_others(*Channel::find(channel));
  }
  return inverse;
}

std::vector<at::Tensor> ExchangeRequest::gradients_from(const std::vector<at::Tensor>& moved) const {
  std::vector<at::Tensor> gradients(differentiable.size());
  for (size_t i = 0, next = 0; i < differentiable.size(); ++i) {
    if (differentiable[i] != 0) gradients[i] = moved[next++];
  }
  return gradients;
}

}  // namespace knapformer
