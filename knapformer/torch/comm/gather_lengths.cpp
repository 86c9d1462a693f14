#include "knapformer/torch/comm/gather_lengths.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <iterator>
#include <map>
#include <string_view>

#include "knapformer/core/util/error.h"

namespace knapformer {
namespace {

constexpr int64_t kLengthsMagic = 0x4b4e41504c454e39;  // "KNAPLEN9": changes with the layout

enum HeaderField : size_t {
  kMagic,
  kBalancer,
  kWidth,
  kStatus,
  kFirstObserved,
  kLastObserved,
  kObservedSeconds,
  kNumSequences,
  kMasks,
  kWork,
  kBytes,
  kHeaderSize
};

/// Numbers after the header.
int64_t num_payload(const int64_t* header) {
  return header[kNumSequences] + header[kMasks] + header[kWork] + header[kBytes];
}

}  // namespace

LengthGatherer::LengthGatherer(std::shared_ptr<CommGroup> group, int64_t balancer)
    : group_(std::move(group)), balancer_(balancer), device_(group_->control_device()) {}

LengthGatherer::Pending LengthGatherer::start(GatheredLengths own, int64_t d_model) {
  Pending pending{.said = std::move(own), .d_model = d_model};
  const auto& [lengths, masks, work, sample_bytes, statuses, observed] = pending.said;
  const int64_t size = static_cast<int64_t>(kHeaderSize) + capacity_;
  const at::TensorOptions options = at::TensorOptions().dtype(at::kLong);
  const at::Tensor host = at::empty({size}, options.pinned_memory(!device_.is_cpu()));
  int64_t* out = host.mutable_data_ptr<int64_t>();
  std::fill(out, out + size, 0);
  out[kMagic] = kLengthsMagic;
  out[kBalancer] = balancer_;
  out[kWidth] = d_model;
  out[kStatus] = static_cast<int64_t>(statuses.empty() ? DataStatus::kActive : statuses[0]);
  const ObservedStep step = observed.empty() ? ObservedStep() : observed[0];
  out[kFirstObserved] = step.first_plan;
  out[kLastObserved] = step.last_plan;
  out[kObservedSeconds] = std::bit_cast<int64_t>(step.seconds);
  out[kNumSequences] = lengths.num_sequences();
  std::string mask_texts;  // one after another, each with a zero behind it
  for (const std::optional<Mask>& mask : masks) mask_texts.append(mask.value_or(Mask()).str()).push_back('\0');
  out[kMasks] = static_cast<int64_t>((mask_texts.size() + 7) / 8);
  out[kWork] = static_cast<int64_t>(work.size());
  out[kBytes] = 2 * static_cast<int64_t>(sample_bytes.size());
  if (num_payload(out) <= capacity_) {  // else all ranks see the counts, and gather once more
    int64_t* next = std::copy(lengths.lens().begin(), lengths.lens().end(), out + kHeaderSize);
    std::memcpy(next, mask_texts.data(), mask_texts.size());
    next += out[kMasks];
    for (const double of_sequence : work) *next++ = std::bit_cast<int64_t>(of_sequence);
    for (const SampleBytes& bytes : sample_bytes) {
      *next++ = bytes.fixed;
      *next++ = bytes.per_token;
    }
  }
  pending.own = host.to(device_, /*non_blocking=*/true);
  pending.gathered = at::empty({size * group_->num_ranks()}, options.device(device_));
  pending.work = group_->start_all_gather(pending.gathered, pending.own, "plan_routing");
  return pending;
}

std::optional<GatheredLengths> LengthGatherer::wait(const Pending& pending, const std::stop_token& stop) const {
  group_->wait(*pending.work, device_, "plan_routing", /*on_host=*/true, stop);
  const at::Tensor host = pending.gathered.to(at::kCPU);  // from an accelerator: waits for it
  const auto num_ranks = static_cast<size_t>(group_->num_ranks());
  const std::span<const int64_t> gathered(host.const_data_ptr<int64_t>(), static_cast<size_t>(host.numel()));
  const size_t stride = gathered.size() / num_ranks;
  GatheredLengths result;
  std::vector<int64_t> counts(num_ranks), lens;
  std::map<std::string, Mask, std::less<>> known;  // many sequences have the same mask
  bool any_masks = false, fit = true;
  std::optional<size_t> with_work, without_work;  // ranks that have sequences
  for (size_t rank = 0; rank < num_ranks; ++rank) {
    const int64_t* sent = gathered.data() + rank * stride;
    if (sent[kMagic] != kLengthsMagic)
      throw StateError(text("plan_routing: got of rank ", rank, " something else, expected lengths, from all ranks"));
    if (sent[kBalancer] != balancer_) {
      throw StateError(text("plan_routing: got of rank ", rank, " lengths of balancer ", sent[kBalancer], ", expected ",
                            balancer_, ": all ranks call the balancers of a group in the same order"));
    }
    if (sent[kWidth] != gathered[kWidth]) {
      throw ArgumentError(
          text("d_model: got ", sent[kWidth], " on rank ", rank, ", expected ", gathered[kWidth], ", as on rank 0"));
    }
    counts[rank] = sent[kNumSequences];
    if (counts[rank] > 0) (sent[kWork] > 0 ? with_work : without_work) = rank;
    fit = fit && static_cast<size_t>(num_payload(sent)) <= stride - kHeaderSize;
    if (!fit) continue;
    any_masks = any_masks || sent[kMasks] > 0;
    result.statuses.push_back(static_cast<DataStatus>(sent[kStatus]));
    result.observed.push_back({.first_plan = sent[kFirstObserved],
                               .last_plan = sent[kLastObserved],
                               .seconds = std::bit_cast<double>(sent[kObservedSeconds])});
    const int64_t *own_lens = sent + kHeaderSize, *own_masks = own_lens + counts[rank];
    lens.insert(lens.end(), own_lens, own_masks);
    const char* mask_text = reinterpret_cast<const char*>(own_masks);
    for (int64_t i = 0; i < counts[rank]; ++i) {
      std::optional<Mask>& mask = result.masks.emplace_back();
      if (sent[kMasks] == 0) continue;
      const std::string_view own_text = mask_text;
      if (!known.contains(own_text)) known.emplace(own_text, Mask::parse(own_text));
      mask = known.find(own_text)->second;
      mask_text += own_text.size() + 1;
    }
    const int64_t *own_work = own_masks + sent[kMasks], *own_bytes = own_work + sent[kWork];
    std::transform(own_work, own_bytes, std::back_inserter(result.work), std::bit_cast<double, int64_t>);
    for (int64_t i = 0; i < sent[kBytes]; i += 2) result.sample_bytes.push_back({own_bytes[i], own_bytes[i + 1]});
  }
  if (!fit) return std::nullopt;
  if (!any_masks) result.masks.clear();
  if (with_work && without_work) {
    throw ArgumentError(text("work: got none on rank ", *without_work, ", expected that of each sequence, as on rank ",
                             *with_work, ", or none on any rank"));
  }
  result.lengths = SequenceLengths(std::move(lens), counts);
  return result;
}

GatheredLengths LengthGatherer::finish(Pending pending) {
  for (;;) {
    if (std::optional<GatheredLengths> result = wait(pending)) return *std::move(result);
    const at::Tensor gathered = pending.gathered.to(at::kCPU).view({group_->num_ranks(), -1});
    for (int32_t rank = 0; rank < group_->num_ranks(); ++rank) {
      const int64_t needed = num_payload(gathered.const_data_ptr<int64_t>() + rank * gathered.size(1));
      capacity_ = std::max(capacity_, static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(needed))));
    }
    pending = start(std::move(pending.said), pending.d_model);
  }
}

}  // namespace knapformer
