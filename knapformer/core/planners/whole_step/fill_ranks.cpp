#include "knapformer/core/planners/whole_step/fill_ranks.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace knapformer {
namespace {

/// One replica of a step. Sequences move to ranks that have none, the smallest degrees first and then by ascending
/// work, if each of their ranks keeps another one.
class ReplicaFill {
 public:
  ReplicaFill(const StepPlan& plan, int32_t replica, std::vector<int32_t>& micro_batches,
              std::vector<Placement>& placements, const Ragged<int64_t>& chunk_lens)
      : input_(plan.input()),
        max_tokens_(plan.max_tokens()),
        num_ranks_(input_.sequences.topology.num_ranks_per_replica()),
        first_rank_(replica * num_ranks_),
        micro_batches_(micro_batches),
        placements_(placements),
        chunk_lens_(chunk_lens),
        held_(static_cast<size_t>(num_ranks_) * input_.num_micro_batches) {
    const PlanInput& step = input_.sequences;
    const auto [first, last] = step.sequences_of(replica);
    for (SequenceId id = first; id < last; ++id.value) {
      add(id.value, +1);
      sequences_of_[placements_[id.index()].degree].emplace_back(step.work(id), id.value);
    }
    for (auto& [degree, sequences] : sequences_of_) std::ranges::sort(sequences);
  }

  /// Returns whether a sequence moved.
  bool fill() {
    bool moved = false;
    std::map<int32_t, size_t> next;  // by degree: the sequences before this one have ranks that hold no other
    for (int32_t k = 0; k < input_.num_micro_batches; ++k) {
      for (int32_t r = first_rank_; r < first_rank_ + num_ranks_; ++r) {
        if (held(k, r).num_sequences == 0) moved = fill(k, Rank(r), next) || moved;
      }
    }
    return moved;
  }

 private:
  struct Held {
    int32_t num_sequences = 0;
    int64_t tokens = 0;
  };
  Held& held(int32_t micro_batch, int32_t rank) {
    return held_[static_cast<size_t>(micro_batch) * num_ranks_ + (rank - first_rank_)];
  }

  /// Adds a sequence to what its ranks hold (+1), or takes it away (-1).
  void add(int32_t s, int32_t sign) {
    for (int32_t i = 0; i < placements_[s].degree; ++i) {
      Held& there = held(micro_batches_[s], placements_[s].first_rank.value + i);
      there.num_sequences += sign;
      there.tokens += sign * chunk_lens_.of(s)[i];
    }
  }

  bool is_spare(int32_t s) {
    for (int32_t i = 0; i < placements_[s].degree; ++i) {
      if (held(micro_batches_[s], placements_[s].first_rank.value + i).num_sequences < 2) return false;
    }
    return true;
  }

  bool fits(int32_t s, int32_t micro_batch, const Placement& place) {
    for (int32_t i = 0; i < place.degree; ++i) {
      if (held(micro_batch, place.first_rank.value + i).tokens + chunk_lens_.of(s)[i] > max_tokens_) return false;
    }
    return true;
  }

  /// Gives the rank a sequence.
  bool fill(int32_t micro_batch, Rank rank, std::map<int32_t, size_t>& next) {
    const Topology& topology = input_.sequences.topology;
    const BagId bag = topology.bag_of(rank);
    for (const int32_t degree : topology.shapes()[topology.bag(bag).shape].degrees) {
      const auto& sequences = sequences_of_[degree];
      const int32_t in_bag = rank.value - topology.bag(bag).first_rank.value;
      const Placement place{.bag = bag, .first_rank = Rank(rank.value - in_bag % degree), .degree = degree};
      size_t& first = next[degree];
      while (first < sequences.size() && !is_spare(sequences[first].second)) ++first;
      for (size_t i = first; i < sequences.size(); ++i) {
        const int32_t s = sequences[i].second;
        if (!fits(s, micro_batch, place) || !is_spare(s)) continue;
        add(s, -1);
        micro_batches_[s] = micro_batch;
        placements_[s] = place;
        add(s, +1);
        return true;
      }
    }
    return false;
  }

  const StepInput& input_;
  int64_t max_tokens_;
  int32_t num_ranks_, first_rank_;
  std::vector<int32_t>& micro_batches_;
  std::vector<Placement>& placements_;
  const Ragged<int64_t>& chunk_lens_;
  std::vector<Held> held_;                                                   // by micro-batch and rank
  std::map<int32_t, std::vector<std::pair<double, int32_t>>> sequences_of_;  // by degree: work and id, ascending
};

}  // namespace

StepPlan fill_ranks(const StepPlan& plan) {
  const StepInput& input = plan.input();
  std::vector<int32_t> micro_batches(plan.micro_batches().begin(), plan.micro_batches().end());
  std::vector<Placement> placements;
  Ragged<int64_t> chunk_lens;  // a whole sequence's is its length, wherever it goes
  std::vector<int32_t> next(plan.plans().size());
  for (const int32_t k : micro_batches) {
    const Plan& micro_batch = plan.plans()[k];
    const SequenceId id(next[k]++);
    placements.push_back(micro_batch.placement(id));
    append_chunk_lens(micro_batch, id, chunk_lens);
  }
  for (int32_t r = 0; r < input.sequences.topology.num_replicas(); ++r)
    for (ReplicaFill replica(plan, r, micro_batches, placements, chunk_lens); replica.fill();) {
    }
  std::vector<std::string> solvers;
  for (const Plan& micro_batch : plan.plans()) solvers.push_back(micro_batch.solver());
  std::vector<Plan> plans = plans_as_placed(input, micro_batches, placements, chunk_lens, solvers);
  return StepPlan(input, std::move(micro_batches), std::move(plans));
}

}  // namespace knapformer
