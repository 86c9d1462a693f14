// A process group whose ranks are threads of one process: what the collectives of a balancer need, and no more.
//
// Torch's wheel has no headers of Gloo, so C++ can make no group over processes from it. With a full LibTorch, or
// inside a Python process, take c10d's ProcessGroupGloo or ProcessGroupNCCL in its place: the balancer takes any
// ProcessGroup.
#pragma once

#include <cstdint>
#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

/// The groups of one program. Every rank of a group passes the same `ranks` and gets its own handle. Thread-safe.
class ThreadGroups {
 public:
  ThreadGroups();
  ~ThreadGroups();
  c10::intrusive_ptr<c10d::ProcessGroup> group(const std::vector<int64_t>& ranks, int64_t rank);

 private:
  struct State;
  std::unique_ptr<State> state_;
};
