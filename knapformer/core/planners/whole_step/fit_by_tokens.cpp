#include "knapformer/core/planners/whole_step/fit_by_tokens.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "knapformer/core/util/interrupt.h"

namespace knapformer {
namespace {

/// The room of one replica's groups, in every micro-batch.
class ReplicaRoom {
 public:
  ReplicaRoom(const StepInput& input, int32_t replica) : seq_lens_(input.sequences.seq_lens) {
    const Topology& topology = input.sequences.topology;
    const auto [first, last] = input.sequences.sequences_of(replica);
    int64_t sum = 0;
    for (SequenceId id = first; id < last; ++id.value) {
      ids_.push_back(id);
      sum += seq_lens_[id];
    }
    for (const BagShape& shape : topology.shapes())
      degrees_.insert(degrees_.end(), shape.degrees.begin(), shape.degrees.end());
    std::ranges::sort(degrees_);
    degrees_.erase(std::unique(degrees_.begin(), degrees_.end()), degrees_.end());
    const int64_t limit = std::min(input.sequences.max_tokens_per_rank, sum);  // so that no product overflows
    for (int32_t b = 0; b < topology.num_bags_per_replica(); ++b) {
      const BagId bag(replica * topology.num_bags_per_replica() + b);
      add_groups(topology, bag);
    }
    std::vector<int64_t> empty;
    for (const Group& group : groups_) empty.push_back(limit * group.place.degree);
    room_.assign(static_cast<size_t>(input.num_micro_batches), empty);
    most_room_.resize(room_.size());
    for (size_t k = 0; k < room_.size(); ++k) find_most_room(k);
  }

  /// Whether all sequences find room. By sequence id.
  bool place_all(FitInto into, std::vector<PackedSequence>& out) {
    std::ranges::stable_sort(ids_, std::greater{}, [&](SequenceId id) { return seq_lens_[id]; });
    return std::ranges::all_of(ids_, [&](SequenceId id) { return place(seq_lens_[id], into, out[id.index()]); });
  }

 private:
  /// Indices in groups_: parents come before their children.
  struct Group {
    Placement place;
    size_t degree_index = 0;
    int32_t parent = -1;
  };
  /// The emptiest group, by the room that it and all groups around it have.
  struct Emptiest {
    int32_t group = -1;
    int64_t tokens = -1;
  };

  void add_groups(const Topology& topology, BagId id) {
    const Bag& bag = topology.bag(id);
    const std::vector<int32_t>& degrees = topology.shapes()[bag.shape].degrees;
    size_t first_parent = 0;
    for (size_t d = degrees.size(); d-- > 0;) {
      const size_t first = groups_.size();
      for (int32_t rank = 0; rank < bag.num_ranks; rank += degrees[d]) {
        const bool is_bag = d + 1 == degrees.size();
        groups_.push_back(
            {.place = {.bag = id, .first_rank = Rank(bag.first_rank.value + rank), .degree = degrees[d]},
             .degree_index = static_cast<size_t>(std::ranges::lower_bound(degrees_, degrees[d]) - degrees_.begin()),
             .parent = is_bag ? -1 : static_cast<int32_t>(first_parent) + rank / degrees[d + 1]});
      }
      first_parent = first;
    }
  }

  /// By degree and, last, of whole bags.
  void find_most_room(size_t micro_batch) {
    std::vector<Emptiest>& most = most_room_[micro_batch];
    most.assign(degrees_.size() + 1, {});
    with_parents_.resize(groups_.size());
    for (size_t g = 0; g < groups_.size(); ++g) {
      const int32_t parent = groups_[g].parent;
      int64_t& tokens = with_parents_[g] = room_[micro_batch][g];
      if (parent >= 0) tokens = std::min(tokens, with_parents_[parent]);
      const Emptiest emptiest{.group = static_cast<int32_t>(g), .tokens = tokens};
      if (tokens > most[groups_[g].degree_index].tokens) most[groups_[g].degree_index] = emptiest;
      if (parent < 0 && tokens > most.back().tokens) most.back() = emptiest;
    }
  }

  bool place(int64_t tokens, FitInto into, PackedSequence& out) {
    for (size_t kind = into == FitInto::kBags ? degrees_.size() : 0; kind <= degrees_.size(); ++kind) {
      for (size_t k = 0; k < room_.size(); ++k) {
        const Emptiest& emptiest = most_room_[k][kind];
        if (emptiest.tokens < tokens) continue;
        out = {.micro_batch = static_cast<int32_t>(k), .placement = groups_[emptiest.group].place};
        for (int32_t g = emptiest.group; g >= 0; g = groups_[g].parent) room_[k][g] -= tokens;
        find_most_room(k);
        checks_.count(std::ssize(groups_));
        return true;
      }
    }
    return false;
  }

  const SequenceLengths& seq_lens_;
  std::vector<SequenceId> ids_;
  std::vector<int32_t> degrees_;  // ascending
  std::vector<Group> groups_;
  std::vector<std::vector<int64_t>> room_;        // by micro-batch and group: tokens
  std::vector<std::vector<Emptiest>> most_room_;  // by micro-batch, see find_most_room
  std::vector<int64_t> with_parents_;
  InterruptChecks checks_;
};

}  // namespace

std::optional<std::vector<PackedSequence>> fit_by_tokens(const StepInput& input, FitInto into) {
  std::vector<PackedSequence> out(static_cast<size_t>(input.sequences.seq_lens.num_sequences()));
  for (int32_t replica = 0; replica < input.sequences.topology.num_replicas(); ++replica) {
    if (!ReplicaRoom(input, replica).place_all(into, out)) return std::nullopt;
  }
  return out;
}

}  // namespace knapformer
