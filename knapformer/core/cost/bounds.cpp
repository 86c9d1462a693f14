#include "knapformer/core/cost/bounds.h"

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "knapformer/core/cost/step_time.h"
#include "knapformer/core/util/infinity.h"

namespace knapformer {
namespace {

/// Inside nodes or between them.
using Link = double Traffic::*;

std::span<const Bag> bags_of(const Topology& topology, int32_t replica) {
  const auto num_bags = static_cast<size_t>(topology.num_bags_per_replica());
  return topology.bags().subspan(static_cast<size_t>(replica) * num_bags, num_bags);
}

/// What a group of ranks offers a sequence: for a degree, the best values of any group of the replica.
struct Offer {
  int32_t degree = 1;
  double speed = 0;              // summed
  Traffic exchange_s_per_token;  // of tokens of a chunk, as far as nothing can hide it
};

/// What of a token's exchange counts in a bound: what nothing may hide. A part of the queries need not see all keys,
/// and may attend to some while others travel.
Traffic counted(const PlanInput& input, const AttentionShares& shares, Rank first_rank, int32_t degree, bool may_hide) {
  const SentRows rows = sent_range(input.cluster, shares, first_rank, degree).min;
  if (may_hide) return rows.after;
  const QueryCut cut = input.query_cut(degree);
  const bool sees_all = cut.num_parts == 1 || (cut.num_stages == 1 && input.masks.empty());
  return sees_all ? rows.sum() : rows.after * 2;
}

/// One for each degree, ascending.
std::vector<Offer> offers_of(const PlanInput& input, const Topology& topology, int32_t replica, bool may_hide) {
  const AttentionShares shares = input.attention_shares();
  std::vector<Offer> offers;
  for (const Bag& bag : bags_of(topology, replica)) {
    for (const int32_t degree : topology.shapes()[bag.shape].degrees) {
      auto offer = std::ranges::lower_bound(offers, degree, {}, &Offer::degree);
      if (offer == offers.end() || offer->degree != degree) {
        offer = offers.insert(offer,
                              {.degree = degree, .exchange_s_per_token = {.inside = kInfinity, .between = kInfinity}});
      }
      Traffic& sent = offer->exchange_s_per_token;  // until the end, the part of a row
      for (int32_t r = bag.first_rank.value; r < bag.first_rank.value + bag.num_ranks; r += degree) {
        const Traffic min = counted(input, shares, Rank(r), degree, may_hide);
        sent = {.inside = std::min(sent.inside, min.inside), .between = std::min(sent.between, min.between)};
        offer->speed = std::max(offer->speed, input.group_speed(Rank(r), degree).sum);
      }
    }
  }
  for (Offer& offer : offers) offer.exchange_s_per_token = exchange_s(input, offer.exchange_s_per_token);
  return offers;
}

/// Exchange time of a token on a rank of a flat bag. All tokens are divided alike over the links, and nothing hides the
/// exchange.
double flat_exchange_s(const PlanInput& input, const AttentionShares& shares, const Bag& bag) {
  const Traffic sent_s = exchange_s(input, counted(input, shares, bag.first_rank, bag.num_ranks, /*may_hide=*/false));
  return std::max(sent_s.inside, sent_s.between);
}

/// Whether the items may fit into `num_bags` bags of one capacity: false is a proof that they do not. For every l, an
/// item above capacity - l shares no bag with an item of l or more, so all other items of l or more must fit into the
/// other bags (as in Martello and Toth's bound L2, 1990). O(n log n).
bool may_be_packed(std::vector<double> items, size_t num_bags, double capacity) {
  std::sort(items.begin(), items.end(), std::greater<>());
  const auto count_above = [&](double value) {
    return static_cast<size_t>(std::lower_bound(items.begin(), items.end(), value, std::greater<>()) - items.begin());
  };
  std::vector<double> sum_before(items.size() + 1, 0.0);
  for (size_t i = 0; i < items.size(); ++i) sum_before[i + 1] = sum_before[i] + items[i];
  const size_t num_above_half = count_above(capacity / 2);
  if (num_above_half > num_bags) return false;
  for (size_t i = num_above_half; i < items.size(); ++i) {
    const size_t num_alone = count_above(capacity - items[i]);
    if (sum_before[i + 1] - sum_before[num_alone] > static_cast<double>(num_bags - num_alone) * capacity) return false;
  }
  return true;
}

/// The bound with the exchange on one link alone.
double link_lower_bound_s(const PlanInput& input, const Topology& topology, int32_t replica,
                          std::span<const Offer> offers, Link link) {
  const int32_t num_ranks = topology.num_ranks_per_replica();
  const auto [first, last] = input.sequences_of(replica);
  // The exchange is not faster on a faster rank. The sum below weights rank time by speed, so it counts the exchange
  // times the speed of the rank that spends it, which is at least the lowest speed.
  const auto [total_speed, min_speed] = input.group_speed(Rank(replica * num_ranks), num_ranks);

  // A sequence may take an offer where (work + exchange, in seconds of a rank of speed 1) <= T * the offer's speed.
  // As T falls, the sequence goes from one offer to a dearer one, at thresholds that follow from the sequence alone.
  const BlockRates rates(input);
  const auto cost_s = [&, min_speed = min_speed](SequenceId id, const Offer& offer) {
    return rates.work_s(input, id) +
           static_cast<double>(input.seq_lens[id]) * (offer.exchange_s_per_token.*link * min_speed);
  };
  const auto exchange_s = [link](const Offer& offer) { return offer.exchange_s_per_token.*link; };
  const Offer& cheapest = *std::ranges::min_element(offers, {}, exchange_s);
  double cheapest_s = 0;  // the sum over sequences, each with its cheapest offer
  double longest_s = 0;   // below this T some sequence fits nowhere
  for (int32_t s = first.value; s < last.value; ++s) {
    const SequenceId id(s);
    const double cost = cost_s(id, cheapest);
    cheapest_s += cost;
    double fits_from = cost / cheapest.speed;
    if (fits_from <= longest_s) continue;
    for (const Offer& offer : offers) fits_from = std::min(fits_from, cost_s(id, offer) / offer.speed);
    longest_s = std::max(longest_s, fits_from);
  }
  double bound_s = std::max(longest_s, cheapest_s / total_speed);

  // Only steps with a threshold above the bound so far can raise it. Few sequences have such steps.
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

/// Whether some rank may have attention that hides an exchange.
bool may_hide(const Cluster& cluster, const Topology& topology) {
  return cluster.overlaps_attention &&
         std::ranges::any_of(topology.shapes(), [](const BagShape& shape) { return shape.degrees.front() == 1; });
}

}  // namespace

double replica_lower_bound_s(const PlanInput& input, const Topology& topology, int32_t replica) {
  const auto [first, last] = input.sequences_of(replica);
  if (first == last) return 0;
  const std::vector<Offer> offers = offers_of(input, topology, replica, may_hide(input.cluster, topology));
  double bound_s = link_lower_bound_s(input, topology, replica, offers, &Traffic::inside);
  if (std::ranges::any_of(offers, [](const Offer& offer) { return offer.exchange_s_per_token.between > 0; }))
    bound_s = std::max(bound_s, link_lower_bound_s(input, topology, replica, offers, &Traffic::between));
  return bound_s;
}

double lower_bound_s(const PlanInput& input) {
  double step_s = 0;
  for (int32_t replica = 0; replica < input.topology.num_replicas(); ++replica) {
    const double block_s = replica_lower_bound_s(input, input.topology, replica);
    step_s = std::max(step_s, replica_step_s(input, block_s, 0));
  }
  return step_s + input.cluster.fixed_s;
}

PlanPrediction prediction_of(const Plan& plan) {
  return {.predicted_time_s = predict_step(plan).total_s(), .lower_bound_s = lower_bound_s(plan.input())};
}

bool flat_may_take_less(const PlanInput& input, const Topology& topology, int32_t replica, double block_s) {
  if (replica_lower_bound_s(input, topology, replica) >= block_s) return false;
  if (topology.shapes().size() > 1) return true;
  const auto bags = bags_of(topology, replica);
  const AttentionShares shares = input.attention_shares();
  double bag_speed = 0, token_exchange_s = kInfinity;  // of the best bags
  for (const Bag& bag : bags) {
    bag_speed = std::max(bag_speed, input.group_speed(bag.first_rank, bag.num_ranks).sum);
    token_exchange_s = std::min(token_exchange_s, flat_exchange_s(input, shares, bag));
  }
  // Rank time is weighted by speed, as in replica_lower_bound_s: the exchange is multiplied by the lowest speed.
  token_exchange_s *= input.group_speed(bags.front().first_rank, topology.num_ranks_per_replica()).slowest;
  const BlockRates rates(input);
  const auto [first, last] = input.sequences_of(replica);
  std::vector<double> seconds;
  seconds.reserve(last.index() - first.index());
  for (SequenceId id = first; id < last; ++id.value)
    seconds.push_back(rates.work_s(input, id) + static_cast<double>(input.seq_lens[id]) * token_exchange_s);
  constexpr double kRounding = 1 + 1e-9;  // sums of a proof may round
  return may_be_packed(std::move(seconds), bags.size(), block_s * bag_speed * kRounding);
}

double flat_lower_bound_s(const PlanInput& input, const Topology& topology, int32_t replica,
                          std::span<const Placement> placements) {
  const auto bags = bags_of(topology, replica);
  const AttentionShares shares = input.attention_shares();
  const BlockRates rates(input);
  const BagId first_bag = topology.bag_of(bags.front().first_rank);
  const auto [first, last] = input.sequences_of(replica);
  std::vector<double> work(bags.size()), tokens(bags.size());
  for (int32_t s = first.value; s < last.value; ++s) {
    const auto bag = static_cast<size_t>(placements[s].bag.value - first_bag.value);
    work[bag] += rates.work_s(input, SequenceId(s));
    tokens[bag] += static_cast<double>(input.seq_lens[SequenceId(s)]);
  }
  double bound_s = 0;
  for (size_t b = 0; b < bags.size(); ++b) {
    const PlanInput::GroupSpeed speed = input.group_speed(bags[b].first_rank, bags[b].num_ranks);
    const double exchange_s = tokens[b] * flat_exchange_s(input, shares, bags[b]);
    bound_s = std::max(bound_s, (work[b] + exchange_s * speed.slowest) / speed.sum);
  }
  return bound_s;
}

}  // namespace knapformer
