// A lifeline: how ranks learn that the process of one of them is gone.
//
// A rank that is killed says nothing, and ranks that wait for it in the store see no transport fail. So each rank of a
// balancer holds a connection to the next rank, the last one to the first. The system closes the connection when that
// process ends, however it ends. While the process is stopped or busy the connection stays open, and needs no answer: a
// rank that goes on after any time never counts as gone. Where a whole host vanishes, the system's keep-alive probes
// find out within 8 s. A rank that leaves says goodbye first.
//
// Nothing travels but a number at the start and a byte at the end; one thread sleeps in poll(). Where ranks cannot
// reach each other this way (a firewall) there are no lifelines, and a killed rank is noticed at the group's timeout.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace knapformer {

class Lifeline {
 public:
  /// Listens, and leaves its address in the store. on_end(rank): that rank's process ended without a goodbye; called on
  /// the lifeline's thread, once at most.
  Lifeline(c10::intrusive_ptr<c10d::Store> store, int32_t rank, int32_t num_ranks, std::function<void(int32_t)> on_end);
  /// After all ranks have made theirs: connects to the next rank, and starts the thread.
  void connect();
  /// After all ranks have connected: takes the address out of the store.
  void withdraw_address();
  /// Says goodbye. Not for a forked process (owned_by_this_process): it lacks the thread, and the connections speak for
  /// another process.
  ~Lifeline();
  Lifeline(const Lifeline&) = delete;
  Lifeline& operator=(const Lifeline&) = delete;

 private:
  void run();
  void accept_peer();
  /// Whether there is more to hear from the next rank.
  bool hear_next();

  c10::intrusive_ptr<c10d::Store> store_;
  int32_t rank_, next_;
  std::function<void(int32_t)> on_end_;
  uint64_t number_ = 0, next_number_ = 0;  // proof that a connection reaches the right lifeline
  int listener_ = -1, to_next_ = -1, wake_ = -1;
  bool is_known_ = false;           // the next rank has sent its number
  std::vector<int> from_previous_;  // connections to this rank
  std::thread thread_;
};

}  // namespace knapformer
