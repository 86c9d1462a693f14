#include "knapformer/core/greedy_solver.h"

#include <algorithm>
#include <bit>
#include <span>

#include "knapformer/core/radix_sort.h"

namespace knapformer {
namespace {

/// Bags of one size in a replica. All have the same capacity; a binary heap gives the least occupied, ties by id.
class BagQueue {
 public:
  BagQueue(std::span<const Bag> bags, int32_t first, int32_t count, double capacity)
      : num_ranks_(bags[static_cast<size_t>(first)].num_ranks), capacity_(capacity), heap_(static_cast<size_t>(count)) {
    for (int32_t i = 0; i < count; ++i) heap_[static_cast<size_t>(i)] = {.occupancy = 0, .bag = BagId(first + i)};
  }

  struct Entry {
    double occupancy = 0;
    BagId bag;

    bool operator<(const Entry& other) const {
      return occupancy != other.occupancy ? occupancy < other.occupancy : bag < other.bag;
    }
  };

  int32_t num_ranks() const { return num_ranks_; }
  double capacity() const { return capacity_; }
  const Entry& top() const { return heap_.front(); }

  /// Puts `work` into the least occupied bag.
  void add_to_top(double work) {
    Entry entry = heap_.front();
    entry.occupancy += work / capacity_;
    size_t hole = 0;
    while (true) {  // the entry only grew: sift it down
      size_t child = 2 * hole + 1;
      if (child >= heap_.size()) break;
      if (child + 1 < heap_.size() && heap_[child + 1] < heap_[child]) ++child;
      if (!(heap_[child] < entry)) break;
      heap_[hole] = heap_[child];
      hole = child;
    }
    heap_[hole] = entry;
  }

 private:
  int32_t num_ranks_;
  double capacity_;
  std::vector<Entry> heap_;
};

/// The queues of one replica, small bags first.
std::vector<BagQueue> make_queues(const Topology& topology, int32_t replica, double target_per_rank) {
  std::vector<BagQueue> queues;
  const std::span<const Bag> bags = topology.bags();
  int32_t first = replica * topology.num_bags_per_replica();
  for (const BagShape& shape : topology.shapes()) {
    queues.emplace_back(bags, first, shape.num_bags, shape.num_ranks_per_bag() * target_per_rank);
    first += shape.num_bags;
  }
  return queues;
}

void assign_replica(const PlanInput& input, const Topology& topology, int32_t replica, std::span<Placement> placements,
                    std::vector<KeyedIndex>& order) {
  const int32_t num_ranks = topology.num_ranks_per_replica();
  const SequenceId first = input.seq_lens.first_of(Rank(replica * num_ranks));
  const SequenceId last = input.seq_lens.last_of(Rank((replica + 1) * num_ranks - 1));

  order.clear();
  double total_work = 0;
  for (int32_t s = first.value; s < last.value; ++s) {
    // In TFLOP, as the authors' code counts: so sums round alike, and near-ties of occupancy fall the same way.
    const double work = input.work(SequenceId(s)) / 1e12;
    total_work += work;
    // The bits of a double >= 0 order as it does; inverted, the most work comes first.
    order.push_back({.key = ~std::bit_cast<uint64_t>(work), .index = s});
  }
  sort_by_key(order);

  std::vector<BagQueue> queues = make_queues(topology, replica, total_work / num_ranks);
  for (const KeyedIndex& ranked : order) {
    const double work = std::bit_cast<double>(~ranked.key);
    const int64_t length = input.seq_lens[SequenceId(ranked.index)];
    BagQueue* best = nullptr;
    for (BagQueue& queue : queues) {
      const bool candidate = queue.capacity() >= work && length >= queue.num_ranks();
      if (candidate && (best == nullptr || queue.top() < best->top())) best = &queue;
    }
    if (best == nullptr) best = &queues.back();
    const BagId bag = best->top().bag;
    placements[static_cast<size_t>(ranked.index)] = {
        .bag = bag, .first_rank = topology.bag(bag).first_rank, .degree = best->num_ranks()};
    best->add_to_top(work);
  }
}

}  // namespace

std::vector<Placement> greedy_placements(const PlanInput& input, const Topology& topology) {
  std::vector<Placement> placements(static_cast<size_t>(input.seq_lens.num_sequences()));
  std::vector<KeyedIndex> order;
  order.reserve(placements.size());
  for (int32_t replica = 0; replica < topology.num_replicas(); ++replica) {
    assign_replica(input, topology, replica, placements, order);
  }
  return placements;
}

}  // namespace knapformer
