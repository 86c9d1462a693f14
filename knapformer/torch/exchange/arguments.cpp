#include "knapformer/torch/exchange/arguments.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <array>

namespace knapformer {

HeadSharing HeadSharing::inverse() const {
  HeadSharing swapped = *this;
  if (shared_end != kNeither) swapped.shared_end = shared_end == kSend ? kRecv : kSend;
  return swapped;
}

void ExchangeArguments::add(PackedTable table, const std::vector<at::Tensor>& inputs, std::vector<HeadRole> roles,
                            HeadSharing sharing) {
  if (inputs.empty()) return;
  tensors.insert(tensors.end(), inputs.begin(), inputs.end());
  segments.push_back({.table = std::move(table), .roles = std::move(roles), .sharing = sharing});
}

std::string ExchangeArguments::label() const {
  std::string label = call;
  for (size_t i = 0; i < names.size(); ++i) label.append(i == 0 ? "(" : ",").append(names[i]);
  return names.empty() ? label : label + ")";
}

bool ExchangeArguments::any_gradient() const {
  return std::ranges::any_of(differentiable, [](int64_t travels) { return travels != 0; });
}

void ExchangeArguments::decide_gradients() {
  differentiable.clear();
  add_gradients();
  if (at::GradMode::is_enabled()) follow_others(/*in_backward=*/false);
}

void ExchangeArguments::add_gradients() {
  if (!at::GradMode::is_enabled()) return;
  differentiable.resize(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].requires_grad()) differentiable[i] = 1;
  }
}

/// A rank without rows follows one that has rows, as its own tensors may have been made without gradients. It learns
/// here, before autograd looks, which gradients travel on the others, since its backward must run where theirs does.
/// All ranks know from the plan who follows, and whom. In a backward pass a rank whose only rows do not travel follows
/// too, as no gradient may have come for those that do.
void ExchangeArguments::follow_others(bool in_backward) {
  const PackedEndView end(segments.front().table.send);
  const PeersWithoutRows without_rows = in_backward ? end.without_rows() : end.without_any_rows();
  if (without_rows.num == 0) return;
  Listening listening{.num_listeners = without_rows.num};
  if (end.this_peer() == end.speaker()) listening.part = Listening::kSpeaks;
  if (without_rows.this_peer) listening.part = Listening::kListens;
  if (listening.part == Listening::kNone) return;
  const bool may_repeat = !in_backward && torch::autograd::get_current_graph_task_id() >= 0;
  const std::shared_ptr<CommGroup> comm = CommGroup::find(group);
  const std::string gradients =
      comm->watchdog().guard([&] { return comm->gradients_of_speaker(fingerprint(), listening, may_repeat, label()); });
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t travel = gradients[i] - '0';
    if (travel == differentiable[i]) continue;
    tensors[i] = tensors[i].detach().set_requires_grad(travel != 0);
    differentiable[i] = travel;
  }
}

/// In attention a level without rows on this rank follows the other levels: what is differentiable in one of them (q, k
/// or v) is so in this level on the peers, too.
void ExchangeArguments::follow_other_levels() {
  if (heads.num_heads == 0) return;
  std::vector<HeadRole> roles;
  for (const SegmentArguments& segment : segments)
    roles.insert(roles.end(), segment.roles.begin(), segment.roles.end());
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].size(0) > 0 || tensors[i].requires_grad()) continue;
    for (size_t other = 0; other < tensors.size(); ++other) {
      if (roles[other] == roles[i] && tensors[other].requires_grad()) {
        tensors[i] = tensors[i].detach().set_requires_grad(true);
        break;
      }
    }
  }
}

ExchangeArguments ExchangeArguments::inverse(const std::vector<at::Tensor>& gradients) const {
  // A backward that is differentiated itself is another call.
  ExchangeArguments back{.heads = heads,
                         .group = group,
                         .call = call + (at::GradMode::is_enabled() ? " backward, differentiable" : " backward")};
  size_t next = 0;
  for (const SegmentArguments& segment : segments) {
    SegmentArguments kept{.table = segment.table.inverse(), .roles = {}, .sharing = segment.sharing.inverse()};
    for (const HeadRole role : segment.roles) {
      const size_t number = next++;
      if (differentiable[number] == 0) continue;
      back.tensors.push_back(gradients[number]);
      kept.roles.push_back(role);
      if (!names.empty()) back.names.push_back(names[number] + ".grad");
    }
    if (!kept.roles.empty()) back.segments.push_back(std::move(kept));
  }
  back.differentiable.assign(back.tensors.size(), 0);
  if (at::GradMode::is_enabled()) {
    back.follow_other_levels();
    back.add_gradients();
    back.follow_others(/*in_backward=*/true);
  }
  return back;
}

std::vector<at::Tensor> ExchangeArguments::gradients_from(const std::vector<at::Tensor>& moved) const {
  std::vector<at::Tensor> gradients(differentiable.size());
  for (size_t i = 0, next = 0; i < differentiable.size(); ++i) {
    if (differentiable[i] != 0) gradients[i] = moved[next++];
  }
  return gradients;
}

Fingerprint ExchangeArguments::fingerprint() const {
  // This runs for every call, so lines are written in place, in the form that Fingerprint::add gives them.
  Fingerprint fingerprint;
  fingerprint.step = PackedEndView(segments.front().table.send).step();
  std::string& fields = fingerprint.fields;
  fields.reserve(256);
  // All ranks are in the same gradient mode, also those without rows.
  fields.append("call\t").append(call).append(differentiable.empty() ? " without gradients\n" : "\n");
  if (heads.num_heads > 0) {
    fields.append("heads\t").append(std::to_string(heads.num_heads)).append(" query, ");
    fields.append(std::to_string(heads.num_kv_heads)).append(" key/value\n");
  }
  size_t i = 0;
  for (const SegmentArguments& segment : segments) {
    for (const HeadRole role : segment.roles) {
      const at::Tensor& tensor = tensors[i];
      fields.append(names.empty() ? text("tensor ", i) : names[i]);
      fields.append("\t").append(c10::toString(tensor.scalar_type())).append(" (rows");
      for (int64_t dim = 1; dim < tensor.dim(); ++dim) {
        int64_t size = tensor.size(dim);
        // Heads of the whole model, as ranks may have unequal shares.
        if (dim == 1 && role != HeadRole::kNone) size = role == HeadRole::kQuery ? heads.num_heads : heads.num_kv_heads;
        fields.append(", ").append(std::to_string(size));
      }
      fields.append(") on ").append(c10::DeviceTypeName(tensor.device().type(), /*lower_case=*/true)).append("\n");
      fingerprint.gradients.push_back(static_cast<char>('0' + (differentiable.empty() ? 0 : differentiable[i])));
      ++i;
    }
  }
  return fingerprint;
}

std::shared_ptr<const HeadPartition> head_partition(HeadCounts heads, int32_t num_parts) {
  struct Known {
    HeadCounts heads;
    int32_t num_parts = 0;
    std::shared_ptr<const HeadPartition> partition;
  };
  thread_local std::array<Known, 8> known;  // more than the degrees of a bag
  thread_local size_t oldest = 0;
  for (const Known& k : known) {
    if (k.partition && k.heads == heads && k.num_parts == num_parts) return k.partition;
  }
  auto partition = std::make_shared<const HeadPartition>(
      heads.num_heads == 0 ? HeadPartition{} : partition_heads(heads.num_heads, heads.num_kv_heads, num_parts));
  known[oldest++ % known.size()] = {.heads = heads, .num_parts = num_parts, .partition = partition};
  return partition;
}

const HeadShares* shares_of(const HeadPartition& partition, HeadRole role) {
  if (role == HeadRole::kNone) return nullptr;
  return role == HeadRole::kQuery ? &partition.query : &partition.key_value;
}

int64_t num_heads_at(HeadSharing::End end, const HeadShares& shares, const HeadSharing& sharing) {
  if (sharing.shared_end == end) return shares.num_heads;
  return static_cast<int64_t>(shares.of(sharing.index_in_group % sharing.head_parts()).size());
}

}  // namespace knapformer
