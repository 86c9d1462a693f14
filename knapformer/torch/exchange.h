// The ops that move everything: knapformer::exchange, and its two halves.
//
//   exchange(Tensor[] tensors,        rows in, region by region
//            Tensor[] send,           EndTensors of each region: table, rows, index
//            Tensor[] recv,           likewise, for the other end
//            int[] region_sizes,      tensors in each region
//            int[] head_roles,        HeadRole of each tensor
//            int[] head_sharing,      HeadSharing of each region
//            int num_heads,           heads of the whole model at shared ends; 0 without roles
//            int num_kv_heads,
//            int[] differentiable,    of each tensor: 1 where its gradient travels back
//            str channel,             Channel::name
//            str label) -> Tensor[]   "route(x,features[0])": the call and its tensors, for errors
//
//   exchange_start(the same) -> Tensor        packs and launches; a tensor without bytes stands for what is in flight
//   exchange_finish(Tensor started) -> Tensor[]                   waits and unpacks; once
//
// Collective over the channel's group: all ranks call it, in the same order relative to the group's other collectives,
// with tensors that differ in their rows alone, and with the same `differentiable`. A rank without rows takes part like
// any other, forward and backward. One all-to-all, forward and backward each.
//
// Its backward is the exchange with the ends swapped. Where a row or head went to several peers, its gradients add up.
// The backward of a finish starts that, and the backward of its start finishes it: what was computed between the halves
// overlaps with the transport again, in backward.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "knapformer/torch/exchange_request.h"

namespace knapformer {

std::vector<at::Tensor> exchange(const std::vector<RegionInput>& regions, HeadCounts heads, Channel& channel,
                                 const std::string& label);

at::Tensor start_exchange(const std::vector<RegionInput>& regions, HeadCounts heads, Channel& channel,
                          const std::string& label);
std::vector<at::Tensor> finish_exchange(const at::Tensor& started);

}  // namespace knapformer
