#include "knapformer/core/lower_bound.h"

#include <algorithm>
#include <limits>
#include <map>
#include <vector>

namespace knapformer {
namespace {

/// What a group of ranks offers a sequence; of a degree, the best that any group of the replica does.
struct Offer {
  double speed = 0;                                                       // summed
  double exchange_s_per_token = std::numeric_limits<double>::infinity();  // tokens of a chunk
};

/// By rising degree.
std::vector<Offer> offers_of(const PlanInput& input, const Topology& topology, int32_t replica) {
  std::map<int32_t, Offer> offers;
  const auto num_bags = static_cast<size_t>(topology.num_bags_per_replica());
  for (const Bag& bag : topology.bags().subspan(static_cast<size_t>(replica) * num_bags, num_bags)) {
    for (const int32_t degree : topology.shapes()[static_cast<size_t>(bag.shape)].degrees) {
      Offer& best = offers[degree];
      for (int32_t r = bag.first_rank.value; r < bag.first_rank.value + bag.num_ranks; r += degree) {
        best.speed = std::max(best.speed, input.group_speed(Rank(r), degree).sum);
        best.exchange_s_per_token =
            std::min(best.exchange_s_per_token, input.cluster.exchange_s_per_token(Rank(r), degree, input.d_model));
      }
    }
  }
  std::vector<Offer> out;
  for (const auto& [degree, offer] : offers) out.push_back(offer);
  return out;
}

}  // namespace

double replica_lower_bound_s(const PlanInput& input, const Topology& topology, int32_t replica) {
  const int32_t num_ranks = topology.num_ranks_per_replica();
  const auto [first, last] = input.sequences_of(replica);
  if (first == last) return 0;
  const std::vector<Offer> offers = offers_of(input, topology, replica);
  // Exchange does not run faster on a faster rank. Rank time weighed by speed, as the sum below has it, counts it times
  // the speed of the rank that spends it, which is at least the lowest.
  const auto [total_speed, min_speed] = input.group_speed(Rank(replica * num_ranks), num_ranks);

  // A sequence may take an offer where (work + exchange, in seconds of a rank of speed 1) <= T * the offer's speed.
  // With T falling it steps from offer to dearer offer, at thresholds that do not depend on the other sequences.
  const auto cost_s = [&, min_speed = min_speed](SequenceId id, const Offer& offer) {
    return input.work(id) / input.cluster.flops_per_s +
           static_cast<double>(input.seq_lens[id]) * offer.exchange_s_per_token * min_speed;
  };
  double cheapest_s = 0;  // of all sequences, each with its cheapest offer
  double longest_s = 0;   // below this T some sequence fits nowhere
  for (int32_t s = first.value; s < last.value; ++s) {
    double cheapest = std::numeric_limits<double>::infinity(), fits_from = cheapest;
    for (const Offer& offer : offers) {
      const double cost = cost_s(SequenceId(s), offer);
      cheapest = std::min(cheapest, cost);
      fits_from = std::min(fits_from, cost / offer.speed);
    }
    cheapest_s += cheapest;
    longest_s = std::max(longest_s, fits_from);
  }
  double bound_s = std::max(longest_s, cheapest_s / total_speed);

  // Steps above the bound so far raise it. Few sequences have any.
  const Offer& cheapest = *std::min_element(offers.begin(), offers.end(), [](const Offer& a, const Offer& b) {
    return a.exchange_s_per_token < b.exchange_s_per_token;
  });
  struct Step {
    double threshold_s;  // below this T the sequence costs `added_s` more
    double added_s;
  };
  std::vector<Step> steps;
  std::vector<std::pair<double, double>> options;  // threshold, cost
  for (int32_t s = first.value; s < last.value; ++s) {
    const SequenceId id(s);
    if (cost_s(id, cheapest) <= bound_s * cheapest.speed) continue;
    options.clear();
    for (const Offer& offer : offers) options.emplace_back(cost_s(id, offer) / offer.speed, cost_s(id, offer));
    std::sort(options.begin(), options.end());
    double cost = options[0].second;
    for (size_t k = 1; k < options.size(); ++k) {
      if (options[k].second >= cost) continue;
      if (options[k].first > bound_s)
        steps.push_back({.threshold_s = options[k].first, .added_s = cost - options[k].second});
      cost = options[k].second;
    }
  }
  // The smallest T with cost(T) <= T * total_speed; the cost only falls as T grows.
  std::sort(steps.begin(), steps.end(), [](const Step& a, const Step& b) { return a.threshold_s > b.threshold_s; });
  double total_s = cheapest_s;
  for (const Step& step : steps) {
    if (bound_s >= step.threshold_s) break;
    // Below this threshold the cost is higher: either T reaches the threshold, or it is at least what that cost gives.
    total_s += step.added_s;
    bound_s = std::max(bound_s, std::min(step.threshold_s, total_s / total_speed));
  }
  return bound_s;
}

double lower_bound_s_of(const PlanInput& input) {
  double bound_s = 0;
  for (int32_t replica = 0; replica < input.topology.num_replicas(); ++replica) {
    bound_s = std::max(bound_s, replica_lower_bound_s(input, input.topology, replica));
  }
  return bound_s;
}

}  // namespace knapformer
