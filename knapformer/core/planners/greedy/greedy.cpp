#include "knapformer/core/planners/greedy/greedy.h"

#include <span>

#include "knapformer/core/util/winner_tree.h"

namespace knapformer {
namespace {

/// The bags of one size in a replica.
struct BagQueue {
  int32_t num_ranks = 0;
  int32_t first_bag = 0;
  double capacity = 0;
  WinnerTree occupancy;  // by bag
};

void assign_replica(const PlanInput& input, int32_t replica, Capacity capacity, std::span<Placement> placements) {
  const Topology& topology = input.topology;
  const auto [first, last] = input.sequences_of(replica);
  // In TFLOP, as in the authors' code: so sums round alike, and near-ties of occupancy are decided the same way.
  const auto work_of = [&](SequenceId id) { return input.work(id) / 1e12; };
  double total_work = 0;
  for (int32_t s = first.value; s < last.value; ++s) total_work += work_of(SequenceId(s));

  const double target_per_rank = total_work / topology.num_ranks_per_replica();
  std::vector<BagQueue> queues;  // small bags first
  int32_t first_bag = replica * topology.num_bags_per_replica();
  for (const BagShape& shape : topology.shapes()) {
    queues.push_back({.num_ranks = shape.num_ranks_per_bag(),
                      .first_bag = first_bag,
                      .capacity = shape.num_ranks_per_bag() * target_per_rank,
                      .occupancy = WinnerTree(static_cast<size_t>(shape.num_bags))});
    first_bag += shape.num_bags;
  }
  for (const SequenceId id : input.by_descending_work(replica)) {
    const double work = work_of(id);
    const int64_t length = input.seq_lens[id];
    BagQueue* best = nullptr;
    for (BagQueue& queue : queues) {
      const double used = capacity == Capacity::kWhole ? 0 : queue.occupancy.min();
      const bool candidate = queue.capacity * (1 - used) >= work && length >= queue.num_ranks;
      if (candidate && (best == nullptr || queue.occupancy.min() < best->occupancy.min())) best = &queue;
    }
    if (best == nullptr) best = &queues.back();
    const BagId bag(best->first_bag + best->occupancy.winner());  // the least occupied
    placements[id.index()] = {.bag = bag, .first_rank = topology.bag(bag).first_rank, .degree = best->num_ranks};
    best->occupancy.set_min(best->occupancy.min() + work / best->capacity);
  }
}

}  // namespace

std::vector<Placement> greedy_placements(const PlanInput& input, Capacity capacity) {
  std::vector<Placement> placements(static_cast<size_t>(input.seq_lens.num_sequences()));
  for (int32_t replica = 0; replica < input.topology.num_replicas(); ++replica)
    assign_replica(input, replica, capacity, placements);
  return placements;
}

MicroBatchPlan plan_greedy(PlanInput input, Capacity capacity) {
  std::vector<Placement> placements = greedy_placements(input, capacity);
  const char* const name = capacity == Capacity::kWhole ? "greedy" : "greedy_remaining";
  return MicroBatchPlan(std::move(input), name, std::move(placements));
}

}  // namespace knapformer
