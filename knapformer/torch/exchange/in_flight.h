// An exchange between its start and its finish.
//
// To autograd it is a tensor: one without bytes, whose storage owns it. It is on the device of what travels, so that
// autograd runs both halves of a backward in the order and on the stream of what is between them.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "knapformer/torch/comm/comm_group.h"
#include "knapformer/torch/exchange/arguments.h"
#include "knapformer/torch/exchange/call.h"

namespace knapformer {

class InFlight {
 public:
  /// Packs, and launches the all-to-all. Collective.
  explicit InFlight(const ExchangeArguments& arguments);
  /// The same; the tensor that stands for it.
  static at::Tensor start(ExchangeArguments arguments);
  /// What such a tensor stands for. Throws StateError, ArgumentError where it stands for nothing.
  static InFlight& of(const at::Tensor& started);

  /// Waits and unpacks; once.
  std::vector<at::Tensor> finish();
  /// Of one that start() made, without its tensors.
  const ExchangeArguments& arguments() const { return arguments_; }

 private:
  std::shared_ptr<CommGroup> group_;
  ExchangeArguments arguments_;
  std::unique_ptr<ExchangeCall> call_;
  WorkPtr work_;
};

}  // namespace knapformer
