#include "knapformer/torch/learn_lengths.h"

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/max.h>
#include <ATen/ops/select.h>

#include <algorithm>
#include <bit>

#include "knapformer/core/error.h"

namespace knapformer {
namespace {

constexpr int64_t kLengthsMagic = 0x4b4e41504c454e34;  // "KNAPLEN4": changes with the layout

enum HeaderField : size_t { kMagic, kWidth, kStatus, kObservedPlan, kObservedSeconds, kCount, kPairs, kHeaderSize };

}  // namespace

LengthGatherer::LengthGatherer(std::shared_ptr<Channel> channel) : channel_(std::move(channel)) {
  device_ = channel_->control_device();
}

LengthGatherer::Pending LengthGatherer::start(std::span<const int64_t> seq_lens,
                                              std::span<const int64_t> attention_pairs, const GatherHeader& header) {
  Pending pending;
  pending.numbers_.assign(seq_lens.begin(), seq_lens.end());
  pending.numbers_.insert(pending.numbers_.end(), attention_pairs.begin(), attention_pairs.end());
  pending.num_sequences_ = static_cast<int64_t>(seq_lens.size());
  pending.header_ = header;
  launch(pending);
  return pending;
}

void LengthGatherer::launch(Pending& pending) {
  const int64_t size = static_cast<int64_t>(kHeaderSize) + capacity_;
  const at::TensorOptions options = at::TensorOptions().dtype(at::kLong);
  const at::Tensor host = at::empty({size}, options.pinned_memory(!device_.is_cpu()));
  int64_t* out = host.mutable_data_ptr<int64_t>();
  std::fill(out, out + size, 0);
  out[kMagic] = kLengthsMagic;
  out[kWidth] = pending.header_.d_model;
  out[kStatus] = static_cast<int64_t>(pending.header_.status);
  out[kObservedPlan] = pending.header_.observed.plan;
  out[kObservedSeconds] = std::bit_cast<int64_t>(pending.header_.observed.seconds);
  out[kCount] = pending.num_sequences_;
  out[kPairs] = static_cast<int64_t>(pending.numbers_.size()) - pending.num_sequences_;
  const auto fitting = std::min(pending.numbers_.size(), static_cast<size_t>(capacity_));
  std::copy_n(pending.numbers_.begin(), fitting, out + kHeaderSize);
  pending.own_ = host.to(device_, /*non_blocking=*/true);
  pending.gathered_ = at::empty({size * channel_->num_ranks()}, options.device(device_));
  channel_->counters().bytes_sent += size * static_cast<int64_t>(sizeof(int64_t)) * (channel_->num_ranks() - 1);
  channel_->counters().num_collectives += 1;
  pending.work_ = start_all_gather(*channel_->group(), pending.gathered_, pending.own_);
}

std::optional<Learned> LengthGatherer::wait(const Pending& pending, const std::stop_token& stop) const {
  channel_->wait(*pending.work_, device_, "plan_routing", /*on_host=*/true, stop);
  const at::Tensor host = pending.gathered_.to(at::kCPU);  // from an accelerator: waits for it
  const auto num_ranks = static_cast<size_t>(channel_->num_ranks());
  const std::span<const int64_t> gathered(host.const_data_ptr<int64_t>(), static_cast<size_t>(host.numel()));
  const size_t stride = gathered.size() / num_ranks;
  check_agreement(gathered, stride);

  Learned learned;
  std::vector<int64_t> counts(num_ranks), lens;
  bool any_pairs = false;
  for (size_t rank = 0; rank < num_ranks; ++rank) {
    const int64_t* sent = gathered.data() + rank * stride;
    counts[rank] = sent[kCount];
    if (static_cast<size_t>(counts[rank] + sent[kPairs]) > stride - kHeaderSize) return std::nullopt;
    any_pairs = any_pairs || sent[kPairs] > 0;
    learned.statuses.push_back(static_cast<DataStatus>(sent[kStatus]));
    learned.observed.push_back({.plan = sent[kObservedPlan], .seconds = std::bit_cast<double>(sent[kObservedSeconds])});
    lens.insert(lens.end(), sent + kHeaderSize, sent + kHeaderSize + counts[rank]);
  }
  learned.lengths = SequenceLengths(std::move(lens), counts);
  for (size_t rank = 0; any_pairs && rank < num_ranks; ++rank) {
    const int64_t* sent = gathered.data() + rank * stride;
    const int64_t* pairs = sent + kHeaderSize + counts[rank];
    for (int64_t i = 0; i < counts[rank]; ++i) {
      learned.attention_pairs.push_back(sent[kPairs] > 0 ? pairs[i] : kDefaultPairs);
    }
  }
  return learned;
}

Learned LengthGatherer::finish(Pending pending) {
  for (;;) {
    if (std::optional<Learned> learned = wait(pending)) return *std::move(learned);
    const at::Tensor gathered = pending.gathered_.to(at::kCPU).view({channel_->num_ranks(), -1});
    const int64_t most = (gathered.select(1, kCount) + gathered.select(1, kPairs)).max().item<int64_t>();
    capacity_ = std::max(capacity_, static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(most))));
    launch(pending);
  }
}

void LengthGatherer::check_agreement(std::span<const int64_t> gathered, size_t stride) const {
  for (size_t rank = 0; rank * stride < gathered.size(); ++rank) {
    const int64_t* header = gathered.data() + rank * stride;
    if (header[kMagic] != kLengthsMagic) {
      throw StateError(text("plan_routing: rank ", rank, " sent no lengths of this version, expected format ",
                            kLengthsMagic, ", got ", header[kMagic],
                            ": all ranks need the same version of knapformer"));
    }
    if (header[kWidth] != gathered[kWidth]) {
      throw ArgumentError(
          text("d_model: got ", header[kWidth], " on rank ", rank, ", expected ", gathered[kWidth], ", as on rank 0"));
    }
  }
}

}  // namespace knapformer
