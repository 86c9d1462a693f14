#include "knapformer/torch/exchange/arguments.h"

#include <ATen/core/grad_mode.h>

#include <map>
#include <tuple>

namespace knapformer {

void ExchangeArguments::add(PackedTable table, size_t num_tensors) {
  if (num_tensors == 0) return;
  segments.push_back({.table = std::move(table), .roles = std::vector(num_tensors, HeadRole::kNone), .sharing = {}});
}

std::string ExchangeArguments::label() const {
  std::string label = call;
  for (size_t i = 0; i < names.size(); ++i) label.append(i == 0 ? "(" : ",").append(names[i]);
  return names.empty() ? label : label + ")";
}

void ExchangeArguments::follow_other_levels(Tensors& tensors) const {
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

ExchangeArguments ExchangeArguments::inverse() const {
  // A backward that is differentiated itself is another call.
  ExchangeArguments back{.heads = heads,
                         .group = group,
                         .call = call + (at::GradMode::is_enabled() ? " backward, differentiable" : " backward")};
  size_t next = 0;
  for (const SegmentArguments& segment : segments) {
    SegmentArguments kept{.table = segment.table.inverse(), .roles = {}, .sharing = segment.sharing};
    for (const HeadRole role : segment.roles) {
      const size_t number = next++;
      if (!differentiable[number]) continue;
      kept.roles.push_back(role);
      if (!at::GradMode::is_enabled()) back.differentiable.push_back(false);
      if (!names.empty()) back.names.push_back(names[number] + ".grad");
    }
    if (!kept.roles.empty()) back.segments.push_back(std::move(kept));
  }
  return back;
}

Fingerprint ExchangeArguments::fingerprint(at::TensorList tensors) const {
  // This runs for every call, so lines are written in place, in the form that Fingerprint::add gives them.
  Fingerprint fingerprint;
  fingerprint.step = segments.front().table.step;
  std::string& fields = fingerprint.fields;
  fields.reserve(256);
  // All ranks are in the same gradient mode, also those without rows.
  fields.append("call\t").append(call).append(differentiable.empty() ? " without gradients\n" : "\n");
  if (heads.num_heads > 0) {
    fields.append("heads\t").append(std::to_string(heads.num_heads)).append(" query, ");
    fields.append(std::to_string(heads.num_kv_heads)).append(" key/value\n");
  }
  const auto name_of = [&](size_t i) { return names.empty() ? text("tensor ", i) : names[i]; };
  size_t i = 0;
  for (const SegmentArguments& segment : segments) {
    for (const HeadRole role : segment.roles) {
      const at::Tensor& tensor = tensors[i];
      fields.append(name_of(i++));
      fields.append("\t").append(c10::toString(tensor.scalar_type())).append(" (rows");
      for (int64_t dim = 1; dim < tensor.dim(); ++dim) {
        int64_t size = tensor.size(dim);
        // Heads of the whole model, as ranks may have unequal shares.
        if (dim == 1 && role != HeadRole::kNone) size = role == HeadRole::kQuery ? heads.num_heads : heads.num_kv_heads;
        fields.append(", ").append(std::to_string(size));
      }
      fields.append(") on ").append(c10::DeviceTypeName(tensor.device().type(), /*lower_case=*/true)).append("\n");
    }
  }
  for (i = 0; i < differentiable.size(); ++i)
    fields.append(name_of(i)).append(".requires_grad\t").append(differentiable[i] ? "True\n" : "False\n");
  return fingerprint;
}

std::shared_ptr<const HeadPartition> head_partition(HeadCounts heads, int32_t num_parts) {
  thread_local std::map<std::tuple<int64_t, int64_t, int32_t>, std::shared_ptr<const HeadPartition>> known;
  auto& partition = known[{heads.num_heads, heads.num_kv_heads, num_parts}];
  if (!partition) {
    partition = std::make_shared<const HeadPartition>(
        heads.num_heads == 0 ? HeadPartition{} : partition_heads(heads.num_heads, heads.num_kv_heads, num_parts));
  }
  return partition;
}

}  // namespace knapformer
