#include "knapformer/torch/rank_plan.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <string>
#include <utility>

#include "knapformer/core/util/error.h"

namespace knapformer {
namespace {

at::Tensor lengths_tensor(std::span<const int64_t> lens) {
  const at::Tensor tensor = at::empty({static_cast<int64_t>(lens.size())}, at::TensorOptions().dtype(at::kInt));
  std::copy(lens.begin(), lens.end(), tensor.mutable_data_ptr<int32_t>());
  return tensor;
}

SequenceRows rows_of(const std::vector<QueryPart>& sequences) {
  std::vector<int64_t> query_lens, key_lens, query_starts;
  for (const QueryPart& part : sequences) {
    query_lens.push_back(part.num_queries);
    key_lens.push_back(part.num_keys);
    query_starts.push_back(part.first_query - part.first_key);
  }
  return {.query_lens = lengths_tensor(query_lens),
          .key_lens = lengths_tensor(key_lens),
          .query_starts = lengths_tensor(query_starts)};
}

/// Of all that says which rows move: ranks that follow plans of different hash would not exchange the same rows.
int64_t hash_of(const MicroBatchPlan& plan) {
  uint64_t hash = 0;
  const auto add = [&](int64_t value) {  // as boost::hash_combine, with the last steps of MurmurHash3
    hash ^= static_cast<uint64_t>(value) + 0x9e3779b97f4a7c15 + (hash << 6) + (hash >> 2);
    hash = (hash ^ (hash >> 33)) * 0xff51afd7ed558ccd;
  };
  const SequenceLengths& lengths = plan.seq_lens();
  for (int32_t r = 0; r < plan.num_ranks(); ++r) add(lengths.last_of(Rank(r)).value);
  for (const int64_t length : lengths.lens()) add(length);
  for (const Placement& placement : plan.placements()) add(placement.degree);
  for (const Mask& mask : plan.input().masks) add(static_cast<int64_t>(std::hash<std::string>()(mask.str())));
  for (const AttentionCut& cut : plan.input().attention_cuts)
    add(cut.num_parts * AttentionCut::kMaxStages + cut.num_stages);
  for (const Chunk& chunk : plan.chunks()) {
    add(chunk.rank.value);
    add(chunk.num_tokens);
  }
  return static_cast<int64_t>(hash);
}

}  // namespace

PlanAgreement::PlanAgreement(CommGroup& group, const MicroBatchPlan& plan) {
  const at::TensorOptions options = at::TensorOptions().dtype(at::kLong).device(group.control_device());
  own_ = at::full({1}, hash_of(plan), options);
  gathered_ = at::empty({group.num_ranks()}, options);
  work_ = group.start_all_gather(gathered_, own_, "follow");
}

void PlanAgreement::await(CommGroup& group) {
  group.wait(*work_, own_.device(), "follow", /*on_host=*/true);
  const at::Tensor hashes = gathered_.to(at::kCPU);
  const std::span<const int64_t> of_ranks(hashes.const_data_ptr<int64_t>(), static_cast<size_t>(hashes.numel()));
  const auto other = std::ranges::find_if(of_ranks, [&](int64_t hash) { return hash != of_ranks[0]; });
  if (other != of_ranks.end()) {
    throw_argument("plan", text("one on rank ", other - of_ranks.begin(), " that differs from that on rank 0"),
                   "the same plan on all ranks");
  }
}

std::shared_ptr<RankPlan> RankPlan::make(std::shared_ptr<Plan> of_step, int32_t micro_batch, Rank rank,
                                         int64_t number) {
  const auto begin = std::chrono::steady_clock::now();
  const std::shared_ptr<const MicroBatchPlan> plan(of_step, &of_step->plans()[micro_batch]);
  auto step = std::make_shared<RankPlan>(RankPlan{.number = number,
                                                  .of_step = std::move(of_step),
                                                  .plan = plan,
                                                  .route = make_route_tables(*plan, rank),
                                                  .attention = make_attention_tables(*plan, rank)});
  step->seq_lens = lengths_tensor(step->plan->seq_lens().lens(rank));
  step->chunk_lens = lengths_tensor(step->route.chunk_lens);
  step->common_mask = plan->input().common_mask();
  for (const AttentionLevel& level : step->attention.levels) {
    SequenceRows& rows = step->attended.emplace_back(rows_of(level.sequences));
    for (const AttentionLevel::Stage& stage : level.stages)
      rows.stage_key_lens.push_back(lengths_tensor(stage.key_lens));
  }
  step->planning_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return step;
}

void RankPlan::make_masks() {
  if (attended[0].masks) return;
  check_masks_run(plan->input());
  for (size_t level = 0; level < attended.size(); ++level)
    attended[level].masks = std::make_shared<MaskTables>(MaskRows::of(*plan, attention.levels[level]));
}

const RankPlan::PackedTables& RankPlan::tables_on(const TablesDevice& on) {
  // Outside of torch.func's transforms, which would make them tensors of one call of theirs.
  const c10::impl::ExcludeDispatchKeyGuard plain(c10::DispatchKeySet{c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                                                                     c10::DispatchKey::FuncTorchDynamicLayerBackMode});
  const auto known = std::ranges::find(packed, on.device, &TablesOnDevice::device);
  TablesOnDevice& of_device = known == packed.end() ? pack(on) : *known;
  if (on.device.is_cpu()) return of_device.on_host;
  auto& copies = of_device.on_streams;
  const c10::Stream stream = c10::impl::VirtualGuardImpl(on.device.type()).getStream(on.device);
  const auto copied = std::ranges::find(copies, stream, [](const auto& copy) { return copy.first; });
  if (copied != copies.end()) return copied->second;
  PackedTables& tables = copies.emplace_back(stream, of_device.on_host).second;
  copy_index(tables.all, on.device);
  return tables;
}

void RankPlan::pack_ahead(const TablesDevice& on) {
  const c10::DeviceGuard guard(on.device);  // no context opens on another
  pack(on);
  if (!on.takes_masks || plan->input().masks.empty()) return;
  make_masks();
  if (on.device.is_cpu()) return;
  for (const SequenceRows& rows : attended) rows.masks->make_blocks(/*pinned=*/true);
}

RankPlan::TablesOnDevice& RankPlan::pack(const TablesDevice& on) {
  std::vector<const ExchangeTable*> tables = {&route.tokens, &route.sequences};
  for (const AttentionLevel& level : attention.levels) {
    if (level.degree > 1) tables.push_back(&level.queries);
    for (const AttentionLevel::Stage& stage : level.stages) tables.push_back(&stage.keys);
  }
  return packed.emplace_back(
      TablesOnDevice{.device = on.device, .on_host = {pack_tables(tables, on.engine, on.device, number)}});
}

}  // namespace knapformer
