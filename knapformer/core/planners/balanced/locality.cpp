#include "knapformer/core/planners/balanced/locality.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

namespace knapformer {
namespace {

/// Gives the places of equal sequences to other ones of them. `ids`: ascending, as are their home ranks.
void trade_places(const PlanInput& input, std::span<const SequenceId> ids, std::span<Placement> placements) {
  std::vector<Placement> places;
  for (const SequenceId id : ids) places.push_back(placements[id.index()]);
  std::ranges::sort(places, {}, [](const Placement& place) { return std::pair(place.degree, place.first_rank); });
  std::vector<size_t> next_free(ids.size() + 1);  // the first sequence from this one on that has no place yet
  std::iota(next_free.begin(), next_free.end(), size_t{0});
  for (const int32_t reach : {1, input.cluster.ranks_per_node, input.topology.num_ranks()}) {
    std::erase_if(places, [&](const Placement& place) {
      const int32_t first_home = place.first_rank.value / reach * reach;
      auto i =
          static_cast<size_t>(std::ranges::lower_bound(ids, input.seq_lens.first_of(Rank(first_home))) - ids.begin());
      while (next_free[i] != i) i = next_free[i] = next_free[next_free[i]];
      if (i == ids.size() || input.seq_lens.home_of(ids[i]).value >= first_home + std::max(place.degree, reach))
        return false;
      placements[ids[i].index()] = place;
      next_free[i] = i + 1;
      return true;
    });
  }
}

}  // namespace

void bring_home(const PlanInput& input, std::span<Placement> placements) {
  if (!input.model.routed) return;
  for (int32_t replica = 0; replica < input.topology.num_replicas(); ++replica) {
    const std::vector<SequenceId> order = input.by_descending_work(replica);
    for (auto first = order.begin(), last = first; first != order.end(); first = last) {
      last = std::find_if(first, order.end(), [&](SequenceId id) {
        return input.seq_lens[id] != input.seq_lens[*first] || input.pairs_of(id) != input.pairs_of(*first);
      });
      if (last - first > 1) trade_places(input, {first, last}, placements);
    }
  }
}

}  // namespace knapformer
