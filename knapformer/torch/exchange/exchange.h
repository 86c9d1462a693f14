// The ops that move everything: knapformer::exchange, and its two halves.
//
//   exchange(Tensor[] tensors,       rows in, segment by segment
//            int[] differentiable,   of each tensor: 1 where its gradient travels; empty in no_grad mode
//            int[] heads,            query and key/value heads of the whole model; 0, 0 without roles
//            Tensor[] tables,        of each segment: the tensors of its PackedTable, send then recv
//            int[] layout,           number of segments; of each: shared end, degree, index in group, query parts
//                                    (HeadSharing), number of tensors, their HeadRoles
//            str[] names             CommGroup::name, the call, the tensors: for messages
//            ) -> Tensor[]
//
//   exchange_start(the same) -> Tensor             packs and launches; a tensor without bytes stands for what is in
//                                                  flight
//   exchange_finish(Tensor started) -> Tensor[]    waits and unpacks; once
//
// In C++ these arguments are one struct, ExchangeArguments.
//
// Collective over the group: all its ranks call it, in the same order relative to the group's other collectives, with
// tensors that differ only in their number of rows, and with the same `differentiable`. A rank without rows takes part
// like any other, forward and backward. One all-to-all, forward and backward each.
//
// The backward of an exchange is the exchange with the ends swapped. Where a row or head went to several peers, its
// gradients add up. The backward of exchange_finish starts that exchange, and the backward of exchange_start finishes
// it. So what was computed between the halves overlaps with the transport in the backward pass, too.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <string>
#include <vector>

#include "knapformer/core/util/error.h"
#include "knapformer/torch/exchange/arguments.h"

namespace knapformer {

/// Decides which gradients travel, and calls the op. Throws ArgumentError inside of torch.func and vmap, and where
/// tensors have tangents (forward-mode differentiation).
std::vector<at::Tensor> exchange(ExchangeArguments arguments);

/// The same in two halves.
at::Tensor start_exchange(ExchangeArguments arguments);
std::vector<at::Tensor> finish_exchange(const at::Tensor& started);

/// Raises an error of a backward pass, where set. If the error itself were thrown, torch's engine would turn it into
/// Python's RuntimeError; the function throws another exception in its place.
inline std::atomic<void (*)(const Error& error)> raise_in_backward = nullptr;
/// Runs a part of a backward pass.
template <class Body>
auto in_backward(Body body) {
  try {
    return body();
  } catch (const Error& error) {
    if (auto* raise = raise_in_backward.load()) raise(error);
    throw;
  }
}

/// Arguments of the op that are made from the segments.
struct OpArguments {
  std::vector<at::Tensor> tables;
  std::vector<int64_t> layout;
  std::vector<std::string> names;

  explicit OpArguments(const ExchangeArguments& arguments);
};

}  // namespace knapformer
