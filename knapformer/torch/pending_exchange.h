// An exchange in flight: started, not yet finished. What is computed between the two overlaps with the transport.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "knapformer/torch/channel.h"
#include "knapformer/torch/engine.h"
#include "knapformer/torch/exchange_call.h"

namespace knapformer {

class PendingExchange {
 public:
  /// Makes sure that all ranks do the same, packs and launches. Collective over the channel's group; also a rank
  /// without rows takes part.
  static PendingExchange start(const ExchangeArguments& arguments, at::IntArrayRef differentiable,
                               std::shared_ptr<Channel> channel, std::string label);

  /// Waits and unpacks: the outputs, in the order of the arguments' tensors. Once.
  std::vector<at::Tensor> finish();

 private:
  PendingExchange() = default;

  std::string label_;
  std::shared_ptr<Channel> channel_;
  std::unique_ptr<ExchangeCall> call_;
  std::unique_ptr<Engine> engine_;
  WorkPtr work_;
};

}  // namespace knapformer
