// c10d's collectives by one name over the versions of PyTorch that we build against.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace knapformer {

using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// Starts an all-to-all of one-dimensional tensors; splits in elements, by peer.
WorkPtr start_all_to_all(c10d::ProcessGroup& group, at::Tensor& recv, at::Tensor& send,
                         std::vector<int64_t> recv_splits, std::vector<int64_t> send_splits);
/// Starts an all-gather of one-dimensional tensors of equal size.
WorkPtr start_all_gather(c10d::ProcessGroup& group, at::Tensor& gathered, at::Tensor& own);

}  // namespace knapformer
