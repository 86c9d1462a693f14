#include "knapformer/torch/collectives.h"

namespace knapformer {
namespace {

// all_to_all_single and all_gather_single are the newer names; the older ones are deprecated where the newer ones
// exist. Templates, so that only the branch that is there is compiled.
template <class Group>
WorkPtr all_to_all(Group& group, at::Tensor& recv, at::Tensor& send, std::vector<int64_t>& recv_splits,
                   std::vector<int64_t>& send_splits) {
  if constexpr (requires { group.all_to_all_single(recv, send, recv_splits, send_splits); }) {
    return group.all_to_all_single(recv, send, recv_splits, send_splits);
  } else {
    return group.alltoall_base(recv, send, recv_splits, send_splits);
  }
}

template <class Group>
WorkPtr all_gather(Group& group, at::Tensor& gathered, at::Tensor& own) {
  if constexpr (requires { group.all_gather_single(gathered, own); }) {
    return group.all_gather_single(gathered, own);
  } else {
    return group._allgather_base(gathered, own);
  }
}

}  // namespace

WorkPtr start_all_to_all(c10d::ProcessGroup& group, at::Tensor& recv, at::Tensor& send,
                         std::vector<int64_t> recv_splits, std::vector<int64_t> send_splits) {
  return all_to_all(group, recv, send, recv_splits, send_splits);
}

WorkPtr start_all_gather(c10d::ProcessGroup& group, at::Tensor& gathered, at::Tensor& own) {
  return all_gather(group, gathered, own);
}

}  // namespace knapformer
