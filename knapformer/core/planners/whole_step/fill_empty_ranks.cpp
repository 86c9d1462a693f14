#include "knapformer/core/planners/whole_step/fill_empty_ranks.h"

#include <algorithm>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "knapformer/core/util/ragged.h"

namespace knapformer {
namespace {

class RankFiller {
 public:
  explicit RankFiller(const Plan& plan)
      : plan_(plan),
        topology_(plan.input().sequences.topology),
        held_(static_cast<size_t>(topology_.num_ranks()) * plan.input().num_micro_batches),
        micro_batches_(plan.micro_batches()) {
    plan.for_each_sequence([&](SequenceId s, const MicroBatchPlan& micro_batch, SequenceId id) {
      const Placement& place = placements_.emplace_back(micro_batch.placement(id));
      for (const Chunk& chunk : micro_batch.chunks(id)) chunk_lens_.values.push_back(chunk.num_tokens);
      chunk_lens_.end_list();
      count(s.value, +1);
      sequences_of_[{replica_of(place.bag), place.degree}].push_back(s.value);
    });
    for (auto& [key, sequences] : sequences_of_)
      std::ranges::stable_sort(sequences, {}, [&](int32_t s) { return plan.input().sequences.work(SequenceId(s)); });
  }

  Plan run() {
    while (fill_all()) continue;  // a sequence that moved may leave another one spare
    std::vector<std::string> solvers;
    for (const MicroBatchPlan& micro_batch : plan_.plans()) solvers.push_back(micro_batch.solver());
    std::vector<MicroBatchPlan> plans =
        plans_as_placed(plan_.input(), micro_batches_, placements_, chunk_lens_.values, solvers);
    return Plan(plan_.input(), micro_batches_, std::move(plans));
  }

 private:
  struct Held {
    int32_t num_sequences = 0;
    int64_t tokens = 0;
  };
  using Group = std::pair<int32_t, int32_t>;  // replica, degree

  std::span<Held> held(int32_t micro_batch, const Placement& place) {
    const size_t first = static_cast<size_t>(micro_batch) * topology_.num_ranks() + place.first_rank.index();
    return std::span(held_).subspan(first, static_cast<size_t>(place.degree));
  }

  int32_t replica_of(BagId bag) const { return bag.value / topology_.num_bags_per_replica(); }

  void count(int32_t s, int32_t sign) {
    const auto there = held(micro_batches_[s], placements_[s]);
    for (size_t i = 0; i < there.size(); ++i) {
      there[i].num_sequences += sign;
      there[i].tokens += sign * chunk_lens_.of(s)[i];
    }
  }

  bool is_spare(int32_t s) {
    const auto there = held(micro_batches_[s], placements_[s]);
    return std::ranges::find(there, 1, &Held::num_sequences) == there.end();
  }

  bool has_room(int32_t micro_batch, const Placement& place, int32_t s) {
    const auto there = held(micro_batch, place);
    for (size_t i = 0; i < there.size(); ++i) {
      if (there[i].tokens + chunk_lens_.of(s)[i] > max_tokens_) return false;
    }
    return true;
  }

  /// Gives each empty rank a sequence where there is one. Returns whether any got one.
  bool fill_all() {
    bool has_filled = false;
    first_spare_.clear();
    for (int32_t i = 0; i < std::ssize(held_); ++i) {
      if (held_[i].num_sequences > 0) continue;
      has_filled = fill(i / topology_.num_ranks(), Rank(i % topology_.num_ranks())) || has_filled;
    }
    return has_filled;
  }

  bool fill(int32_t micro_batch, Rank rank) {
    const BagId bag = topology_.bag_of(rank);
    const int32_t in_bag = rank.value - topology_.bag(bag).first_rank.value;
    for (const int32_t degree : topology_.shapes()[topology_.bag(bag).shape].degrees) {
      const Placement place{.bag = bag, .first_rank = Rank(rank.value - in_bag % degree), .degree = degree};
      const std::vector<int32_t>& sequences = sequences_of_[{replica_of(bag), degree}];
      size_t& first = first_spare_[{replica_of(bag), degree}];
      while (first < sequences.size() && !is_spare(sequences[first])) ++first;
      for (size_t i = first; i < sequences.size(); ++i) {
        const int32_t s = sequences[i];
        if (!is_spare(s) || !has_room(micro_batch, place, s)) continue;
        count(s, -1);
        micro_batches_[s] = micro_batch;
        placements_[s] = place;
        count(s, +1);
        return true;
      }
    }
    return false;
  }

  const Plan& plan_;
  const Topology& topology_;
  const int64_t max_tokens_ = plan_.max_tokens();
  std::vector<Held> held_;  // by micro-batch, then rank
  std::vector<int32_t> micro_batches_;
  std::vector<Placement> placements_;
  Ragged<int64_t> chunk_lens_;                          // a whole sequence's is its length, wherever it goes
  std::map<Group, std::vector<int32_t>> sequences_of_;  // ascending by work
  std::map<Group, size_t> first_spare_;                 // among these; those before it are not spare
};

}  // namespace

Plan fill_empty_ranks(const Plan& plan) { return RankFiller(plan).run(); }

}  // namespace knapformer
