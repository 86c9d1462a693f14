#include "knapformer/torch/pending_exchange.h"

#include <torch/csrc/autograd/graph_task.h>

#include "knapformer/core/error.h"

namespace knapformer {

PendingExchange PendingExchange::start(const ExchangeArguments& arguments, at::IntArrayRef differentiable,
                                       std::shared_ptr<Channel> channel, std::string label) {
  RECORD_USER_SCOPE(text("knapformer::start ", label));
  PendingExchange pending;
  pending.label_ = std::move(label);
  pending.channel_ = std::move(channel);
  pending.channel_->board().guard([&] {
    pending.call_ = std::make_unique<ExchangeCall>(arguments, pending.label_);
    ExchangeCall& call = *pending.call_;
    if (torch::autograd::get_current_graph_task_id() >= 0) {
      pending.channel_->plan_in_backward() = call.regions().front().send.plan();
    }
    Statement statement = make_statement(arguments, differentiable, pending.label_);
    statement.follows = false;  // autograd has decided (exchange.cpp)
    pending.channel_->agreement().agree(statement);
    pending.engine_ = call.engine() == ExchangeEngine::kRuns ? make_run_engine(call) : make_index_engine(call);
    WireBuffers wire = pending.engine_->pack();
    const std::span<const int64_t> sent = call.sent_bytes(), received = call.received_bytes();
    pending.work_ = start_all_to_all(*pending.channel_->group(), wire.recv, wire.send,
                                     {received.begin(), received.end()}, {sent.begin(), sent.end()});
    ChannelCounters& counters = pending.channel_->counters();
    counters.bytes_sent += call.total_sent_bytes();
    counters.num_collectives += 1;
    pending.engine_->move_own();
  });
  return pending;
}

std::vector<at::Tensor> PendingExchange::finish() {
  return channel_->board().guard([&] {
    if (!work_) throw StateError(text(label_, ": has been finished before, expected once"));
    channel_->wait(*work_, call_->device(), label_);
    work_.reset();
    engine_->unpack();
    engine_.reset();
    std::vector<at::Tensor> outputs = call_->outputs();
    call_.reset();
    return outputs;
  });
}

}  // namespace knapformer
