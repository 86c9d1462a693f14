#include "knapformer/torch/exchange/in_flight.h"

#include <ATen/ops/empty.h>
#include <ATen/record_function.h>

#include <utility>

#include "knapformer/core/util/error.h"
#include "knapformer/torch/comm/watchdog.h"
#include "knapformer/torch/exchange/engine.h"

namespace knapformer {
namespace {

void delete_in_flight(void* in_flight) { delete static_cast<InFlight*>(in_flight); }

}  // namespace

InFlight::InFlight(const ExchangeArguments& arguments) : group_(CommGroup::find(arguments.group)) {
  RECORD_USER_SCOPE(text("knapformer::start ", arguments.label()));
  group_->watchdog().guard([&] {
    call_ = std::make_unique<ExchangeCall>(arguments);
    pack(*call_);
    // The last step before the collective, as ranks look for errors in it. While a backend opens connections, which it
    // does in a group's first collective, they do not.
    group_->fingerprints().agree(arguments.fingerprint());
    at::Tensor received = call_->received(), sent = call_->sent();
    work_ = group_->start_all_to_all(received, sent, call_->received_bytes(), call_->sent_bytes(), call_->label());
    move_own(*call_);
  });
}

at::Tensor InFlight::start(ExchangeArguments arguments) {
  const at::Device device = arguments.tensors.at(0).device();
  auto* in_flight = new InFlight(arguments);
  arguments.tensors.clear();
  in_flight->arguments_ = std::move(arguments);
  at::Tensor started = at::empty({0}, at::TensorOptions().dtype(at::kFloat).device(device));
  started.storage().set_data_ptr_noswap({nullptr, in_flight, &delete_in_flight, device});
  return started;
}

InFlight& InFlight::of(const at::Tensor& started) {
  if (!started.defined()) throw StateError("exchange_start: got no gradient of what it started, expected one");
  auto* in_flight = started.storage().data_ptr().cast_context<InFlight>(&delete_in_flight);
  if (in_flight == nullptr) throw ArgumentError("started: got a tensor that exchange_start did not return");
  return *in_flight;
}

std::vector<at::Tensor> InFlight::finish() {
  return group_->watchdog().guard([&] {
    if (!call_) throw StateError(text(arguments_.label(), ": has been finished before, expected once"));
    const std::unique_ptr<ExchangeCall> call = std::move(call_);
    group_->wait(*work_, call->device(), call->label());
    work_.reset();
    unpack(*call);
    return call->outputs();
  });
}

}  // namespace knapformer
