#include "knapformer/torch/exchange/arguments.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>

namespace knapformer {
namespace {

bool gradient_travels(const at::Tensor& tensor) {
  return at::GradMode::is_enabled() && tensor.requires_grad() &&
         (at::isFloatingType(tensor.scalar_type()) || at::isComplexType(tensor.scalar_type()));
}

/// Of the tensors in a label: "route(x,ids)" -> "x", "ids".
std::vector<std::string> names_in(const std::string& label) {
  std::vector<std::string> names;
  for (size_t comma = label.find('('); comma < label.size() - 1;) {
    const size_t begin = comma + 1;
    comma = std::min(label.find_first_of(",)", begin), label.size() - 1);
    names.push_back(label.substr(begin, comma - begin));
  }
  return names;
}

}  // namespace

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

bool ExchangeArguments::any_differentiable() const {
  return std::find(differentiable.begin(), differentiable.end(), 1) != differentiable.end();
}

void ExchangeArguments::decide_gradients() {
  differentiable.clear();
  if (!at::GradMode::is_enabled()) return;
  for (const at::Tensor& tensor : tensors) differentiable.push_back(gradient_travels(tensor));
  follow_others();
}

/// A rank without rows follows the others: its own tensors may have come about without any gradient. It learns theirs
/// here, before autograd looks, since its backward must run where theirs does. It follows what was agreed on last:
/// where ranks with rows change their minds, in the same gradient mode, that is an error.
void ExchangeArguments::follow_others() {
  if (std::ranges::any_of(tensors, [](const at::Tensor& tensor) { return tensor.size(0) > 0; })) return;
  const std::shared_ptr<CommGroup> comm = CommGroup::find(group);
  const std::string gradients =
      comm->watchdog().guard([&] { return comm->fingerprints().gradients_of_others(fingerprint()); });
  for (size_t i = 0; i < tensors.size(); ++i) {
    const bool travels = gradients[i] == '1';
    if (travels == (differentiable[i] != 0)) continue;
    tensors[i] = tensors[i].detach();
    if (travels) tensors[i].set_requires_grad(true);
    differentiable[i] = travels;
  }
}

ExchangeArguments ExchangeArguments::inverse(const std::vector<at::Tensor>& gradients) const {
  ExchangeArguments back{.heads = heads, .group = group, .label = call_name(label) + " backward"};
  // A backward that is differentiated itself is another call.
  if (at::GradMode::is_enabled()) back.label += ", differentiable";
  const std::vector<std::string> names = names_in(label);
  std::string names_of_gradients;
  size_t next = 0;
  for (const SegmentArguments& segment : segments) {
    std::vector<at::Tensor> inputs;
    std::vector<HeadRole> roles;
    for (const HeadRole role : segment.roles) {
      if (differentiable[next] != 0) {
        inputs.push_back(gradients[next]);
        roles.push_back(role);
        back.differentiable.push_back(gradient_travels(gradients[next]));
        if (next < names.size()) {
          names_of_gradients.append(names_of_gradients.empty() ? "" : ",").append(names[next]).append(".grad");
        }
      }
      ++next;
    }
    back.add(segment.table.inverse(), inputs, std::move(roles), segment.sharing.inverse());
  }
  if (!names.empty()) back.label += "(" + names_of_gradients + ")";
  if (at::GradMode::is_enabled()) back.follow_others();
  return back;
}

std::vector<at::Tensor> ExchangeArguments::gradients_from(const std::vector<at::Tensor>& moved) const {
  std::vector<at::Tensor> gradients(differentiable.size());
  for (size_t i = 0, next = 0; i < differentiable.size(); ++i) {
    if (differentiable[i] != 0) gradients[i] = moved[next++];
  }
  return gradients;
}

std::vector<std::vector<c10::SymInt>> ExchangeArguments::output_shapes() const {
  std::vector<std::vector<c10::SymInt>> shapes;
  for (const SegmentArguments& segment : segments) {
    const HeadPartition partition = head_partition(heads, segment.sharing);
    for (const HeadRole role : segment.roles) {
      std::vector<c10::SymInt> shape = tensors[shapes.size()].sym_sizes().vec();
      shape[0] = segment.table.recv.rows.sym_size(0);
      if (const HeadShares* shares = shares_of(partition, role)) {
        shape[1] = num_heads_at(HeadSharing::kRecv, *shares, segment.sharing);
      }
      shapes.push_back(std::move(shape));
    }
  }
  return shapes;
}

Fingerprint ExchangeArguments::fingerprint() const {
  std::string call = call_name(label);
  // All ranks are in one gradient mode, those without rows as well.
  if (differentiable.empty()) call += " without gradients";
  Fingerprint fingerprint(call);
  if (heads.num_heads > 0) {
    fingerprint.add("heads",
                    std::to_string(heads.num_heads) + " query, " + std::to_string(heads.num_kv_heads) + " key/value");
  }
  const std::vector<std::string> names = names_in(label);
  size_t i = 0;
  for (const SegmentArguments& segment : segments) {
    for (const HeadRole role : segment.roles) {
      const at::Tensor& tensor = tensors[i];
      std::string value = std::string(c10::toString(tensor.scalar_type())) + " (rows";
      for (int64_t dim = 1; dim < tensor.dim(); ++dim) {
        int64_t size = tensor.size(dim);
        // Of the whole model: ranks may have unequal shares.
        if (dim == 1 && role != HeadRole::kNone) size = role == HeadRole::kQuery ? heads.num_heads : heads.num_kv_heads;
        value.append(", ").append(std::to_string(size));
      }
      value.append(") on ").append(c10::DeviceTypeName(tensor.device().type(), /*lower_case=*/true));
      fingerprint.add(i < names.size() ? names[i] : text("tensor ", i), value);
      fingerprint.gradients.push_back(!differentiable.empty() && differentiable[i] != 0 ? '1' : '0');
      ++i;
    }
  }
  return fingerprint;
}

HeadPartition head_partition(HeadCounts heads, const HeadSharing& sharing) {
  if (heads.num_heads == 0) return {};
  return partition_heads(heads.num_heads, heads.num_kv_heads, sharing.degree);
}

const HeadShares* shares_of(const HeadPartition& partition, HeadRole role) {
  if (role == HeadRole::kNone) return nullptr;
  return role == HeadRole::kQuery ? &partition.query : &partition.key_value;
}

int64_t num_heads_at(HeadSharing::End end, const HeadShares& shares, const HeadSharing& sharing) {
  if (sharing.shared_end == end) return shares.num_heads;
  return static_cast<int64_t>(shares.of(sharing.index_in_group).size());
}

}  // namespace knapformer
