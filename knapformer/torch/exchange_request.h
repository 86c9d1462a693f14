// The arguments of the ops that exchange, owned: what a call is made of, and what its backward is made from.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>
#include <vector>

#include "knapformer/torch/channel.h"
#include "knapformer/torch/exchange_call.h"

namespace knapformer {

/// Tensors that travel by one table.
struct RegionInput {
  TableTensors table;
  std::vector<at::Tensor> tensors;
  std::vector<HeadRole> roles;  // one a tensor
  HeadSharing sharing = {};
};

struct ExchangeRequest {
  std::vector<at::Tensor> tensors, send, recv;
  std::vector<int64_t> region_sizes, head_roles, head_sharing;
  HeadCounts heads;
  std::vector<int64_t> differentiable;  // of each tensor: 1 where its gradient travels back
  std::string channel, label;

  /// Which gradients travel back: those of tensors that require one, here and now; on a rank without rows, those that
  /// travel on the others. Regions without tensors are left out. label: "route(x,features[0])", see exchange.h.
  static ExchangeRequest make(const std::vector<RegionInput>& regions, HeadCounts heads, Channel& channel,
                              const std::string& label);
  /// The exchange of the gradients, with the ends swapped: of the tensors whose gradient travels and the regions that
  /// have any. `gradients`: one a tensor of this request.
  ExchangeRequest backward(const std::vector<at::Tensor>& gradients) const;
  /// What `backward` brought, as gradients of this request's tensors: undefined where none travels.
  std::vector<at::Tensor> gradients_from(const std::vector<at::Tensor>& moved) const;

  bool any_differentiable() const;
  ExchangeArguments arguments() const;

 private:
  void follow_others(Channel& channel);
};

}  // namespace knapformer
