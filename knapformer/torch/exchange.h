// The op knapformer::exchange: everything that moves.
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
// Collective over the channel's group: all ranks call it, in the same order relative to the group's other collectives,
// with tensors that differ in their rows alone, and with the same `differentiable`. A rank without rows takes part like
// any other, forward and backward. One all-to-all, forward and backward each.
//
// Its backward is exchange with the ends swapped. Where a row or head went to several peers, its gradients add up.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "knapformer/torch/channel.h"
#include "knapformer/torch/end_tensors.h"
#include "knapformer/torch/exchange_call.h"

namespace knapformer {

/// Tensors that travel by one table.
struct RegionInput {
  TableTensors table;
  std::vector<at::Tensor> tensors;
  std::vector<HeadRole> roles;  // one a tensor
  HeadSharing sharing = {};
};

/// Calls the op. Which gradients travel back: those of tensors that require one, here and now; on a rank without rows,
/// those that travel on the others. `label` as above.
std::vector<at::Tensor> exchange(const std::vector<RegionInput>& regions, HeadCounts heads, Channel& channel,
                                 const std::string& label);

}  // namespace knapformer
