// The ops that move everything: knapformer::exchange, and its two halves.
//
//   exchange(Tensor[] tensors,     rows in, segment by segment
//            ExchangeCall call     the ExchangeArguments, which pass the dispatcher as one object
//            ) -> Tensor[]
//
//   exchange_start(the same) -> Tensor             packs and launches; a tensor without bytes stands for what is in
//                                                  flight
//   exchange_finish(Tensor started) -> Tensor[]    waits and unpacks; once
//
// They are ops so that profilers and dispatch modes (selective activation checkpointing) see them.
//
// Collective over the group: all its ranks call it, in the same order relative to the group's other collectives, with
// tensors that differ only in their number of rows, and of which the same require gradients. A rank without rows takes
// part like any other, forward and backward. One all-to-all, forward and backward each.
//
// The backward of an exchange is the exchange with the ends swapped. Where a row or head went to several peers, its
// gradients add up. The backward of exchange_finish starts that exchange, and the backward of exchange_start finishes
// it. So what was computed between the halves overlaps with the transport in the backward pass, too.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>

#include "knapformer/core/util/error.h"
#include "knapformer/torch/exchange/arguments.h"

namespace knapformer {

/// Throws ArgumentError inside of torch.func and vmap, and where tensors have tangents (forward-mode differentiation).
Tensors run_exchange(const Tensors& tensors, ExchangeArguments arguments);

/// The same in two halves.
at::Tensor start_exchange(const Tensors& tensors, ExchangeArguments arguments);
Tensors finish_exchange(const at::Tensor& started);

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

}  // namespace knapformer
