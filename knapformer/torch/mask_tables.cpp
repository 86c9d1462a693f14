#include "knapformer/torch/mask_tables.h"

#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

namespace knapformer {

void MaskTables::make_blocks(bool pinned) {
  if (blocks_.defined()) return;
  std::vector<int32_t> all;
  std::vector<int64_t> sizes;
  for (size_t range = 0; range < rows_.max_ranges(); ++range) {
    for (const bool is_end : {false, true}) {
      for (const MaskRun& run : rows_.runs) {
        const KeyRange keys = range < run.keys.size() ? run.keys[range] : KeyRange();
        const int64_t first = is_end ? keys.end : keys.first;
        const int64_t step = (is_end ? keys.end_moves : keys.first_moves) ? 1 : 0;
        for (int64_t i = 0; i < run.num_queries; ++i) all.push_back(static_cast<int32_t>(first + i * step));
      }
      sizes.push_back(rows_.num_queries);
    }
  }
  const MaskBlocks blocks = MaskBlocks::of(rows_, kBlockSize);
  for (const BlockLists* lists : {&blocks.some_keys, &blocks.all_keys, &blocks.some_queries, &blocks.all_queries}) {
    for (const std::vector<int32_t>* list : {&lists->counts, &lists->indices}) {
      all.insert(all.end(), list->begin(), list->end());
      sizes.push_back(std::ssize(*list));
    }
  }
  blocks_ = at::empty({std::ssize(all)}, at::TensorOptions(at::kInt).pinned_memory(pinned));
  std::ranges::copy(all, blocks_.mutable_data_ptr<int32_t>());
  sizes_ = std::move(sizes);
}

const MaskTables::Blocks& MaskTables::blocks_on(at::Device device) {
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  for (const auto& [on, known] : copies_) {
    if (on == stream) return known;
  }
  const c10::InferenceMode no_inference(false);  // a later step may want gradients
  make_blocks(/*pinned=*/!device.is_cpu());
  const std::vector<at::Tensor> copied = blocks_.to(device, /*non_blocking=*/true).split_with_sizes(sizes_);
  Blocks blocks;
  size_t next = 0;
  for (; next < 2 * rows_.max_ranges(); next += 2) blocks.bounds.emplace_back(copied[next], copied[next + 1]);
  for (; next < copied.size(); next += 2) {
    const int64_t own = sizes_[next], others = own > 0 ? sizes_[next + 1] / own : 0;
    blocks.lists.push_back(copied[next].view({1, 1, own}));
    blocks.lists.push_back(copied[next + 1].view({1, 1, own, others}));
  }
  return copies_.emplace_back(stream, std::move(blocks)).second;
}

}  // namespace knapformer
