#include "knapformer/core/cost/bounds.h"

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "knapformer/core/cost/step_time.h"
#include "knapformer/core/util/error.h"

namespace knapformer {
namespace {

/// Inside nodes or between them.
using Link = double Traffic::*;

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
  const AttentionCut cut = input.attention_cut(degree);
  const bool sees_all = cut.num_parts == 1 || (cut.num_stages == 1 && input.attention_pairs.empty());
  return sees_all ? rows.sum() : rows.after * 2;
}

/// One for each degree, ascending.
std::vector<Offer> offers_of(const PlanInput& input, const Topology& topology, int32_t replica, bool may_hide) {
  const AttentionShares shares = input.attention_shares();
  std::vector<Offer> offers;
  const auto num_bags = static_cast<size_t>(topology.num_bags_per_replica());
  for (const Bag& bag : topology.bags().subspan(static_cast<size_t>(replica) * num_bags, num_bags)) {
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

/// The least time of a step whose longest micro-batch takes `longest_s` at least, and all of them `sum_s` at least.
using LeastTime = std::function<double(double longest_s, double sum_s)>;

/// The bound with the exchange on one link alone, of `num_micro_batches`.
double link_lower_bound_s(const PlanInput& input, const Topology& topology, int32_t replica,
                          std::span<const Offer> offers, Link link, int32_t num_micro_batches,
                          const LeastTime& least_s) {
  const int32_t num_ranks = topology.num_ranks_per_replica();
  const auto [first, last] = input.sequences_of(replica);
  // The exchange is not faster on a faster rank. The sum below weights rank time by speed, so it counts the exchange
  // times the speed of the rank that spends it, which is at least the lowest speed.
  const auto [total_speed, min_speed] = input.group_speed(Rank(replica * num_ranks), num_ranks);

  // A sequence may take an offer where (work + exchange, in seconds of a rank of speed 1) <= T * the offer's speed, for
  // the T of the longest micro-batch. As T falls, the sequence moves to dearer offers, at thresholds that depend on it
  // alone.
  const BlockRates rates(input);
  const auto cost_s = [&, min_speed = min_speed](SequenceId id, const Offer& offer) {
    return rates.work_s(input, id) +
           static_cast<double>(input.seq_lens[id]) * (offer.exchange_s_per_token.*link * min_speed);
  };
  const auto exchange_s = [link](const Offer& offer) { return offer.exchange_s_per_token.*link; };
  const Offer& cheapest = *std::ranges::min_element(offers, {}, exchange_s);
  double total_s = 0;    // the sum over sequences, each with its cheapest offer
  double longest_s = 0;  // below this T some sequence fits nowhere
  for (int32_t s = first.value; s < last.value; ++s) {
    const SequenceId id(s);
    const double cost = cost_s(id, cheapest);
    total_s += cost;
    double fits_from = cost / cheapest.speed;
    if (fits_from <= longest_s) continue;
    for (const Offer& offer : offers) fits_from = std::min(fits_from, cost_s(id, offer) / offer.speed);
    longest_s = std::max(longest_s, fits_from);
  }
  longest_s = std::max(longest_s, total_s / total_speed / num_micro_batches);

  // Only steps with a threshold above the least T can raise the bound. Few sequences have such steps.
  struct Step {
    double threshold_s;  // below this T the sequence costs `added_s` more
    double added_s;
  };
  std::vector<Step> steps;
  std::vector<std::pair<double, double>> options;  // threshold, cost
  for (int32_t s = first.value; s < last.value; ++s) {
    const SequenceId id(s);
    if (cost_s(id, cheapest) <= longest_s * cheapest.speed) continue;
    options.clear();
    for (const Offer& offer : offers) options.emplace_back(cost_s(id, offer) / offer.speed, cost_s(id, offer));
    std::sort(options.begin(), options.end());
    double cost = options[0].second;
    for (size_t k = 1; k < options.size(); ++k) {
      if (options[k].second >= cost) continue;
      if (options[k].first > longest_s)
        steps.push_back({.threshold_s = options[k].first, .added_s = cost - options[k].second});
      cost = options[k].second;
    }
  }
  // The least time over all T. Between two thresholds the sum is the same, and the lowest T is best.
  std::sort(steps.begin(), steps.end(), [](const Step& a, const Step& b) { return a.threshold_s > b.threshold_s; });
  double bound_s = kInfinity;
  for (const Step& step : steps) {
    bound_s = std::min(bound_s, least_s(step.threshold_s, total_s / total_speed));
    if (least_s(longest_s, total_s / total_speed) >= bound_s) return bound_s;
    total_s += step.added_s;
  }
  return std::min(bound_s, least_s(longest_s, total_s / total_speed));
}

/// Whether some rank may have attention that hides an exchange.
bool may_hide(const Cluster& cluster, const Topology& topology) {
  return cluster.overlaps_attention &&
         std::ranges::any_of(topology.shapes(), [](const BagShape& shape) { return shape.degrees.front() == 1; });
}

/// Of a replica. `topology`: over the same ranks as the input's.
double bound_of(const PlanInput& input, const Topology& topology, int32_t replica, int32_t num_micro_batches,
                const LeastTime& least_s) {
  const auto [first, last] = input.sequences_of(replica);
  if (first == last) return least_s(0, 0);
  const std::vector<Offer> offers = offers_of(input, topology, replica, may_hide(input.cluster, topology));
  const auto bound_on = [&](Link link) {
    return link_lower_bound_s(input, topology, replica, offers, link, num_micro_batches, least_s);
  };
  const double inside_s = bound_on(&Traffic::inside);
  const bool has_network =
      std::ranges::any_of(offers, [](const Offer& offer) { return offer.exchange_s_per_token.between > 0; });
  return has_network ? std::max(inside_s, bound_on(&Traffic::between)) : inside_s;
}

}  // namespace

double replica_lower_bound_s(const PlanInput& input, const Topology& topology, int32_t replica) {
  return bound_of(input, topology, replica, 1,
                  [](double longest_s, double sum_s) { return std::max(longest_s, sum_s); });
}

double blocks_lower_bound_s(const StepInput& input) {
  const PlanInput& step = input.sequences;
  double block_s = 0;
  for (int32_t replica = 0; replica < step.topology.num_replicas(); ++replica)
    block_s = std::max(block_s, replica_lower_bound_s(step, step.topology, replica));
  return block_s;
}

double lower_bound_s(const StepInput& input) {
  const PlanInput& step = input.sequences;
  const auto time_s = [&](double block_s) { return replica_step_s(step, block_s); };
  const int32_t num_waits = input.sync == StepSync::kStep ? 1 : input.num_micro_batches, num_others = num_waits - 1;
  const LeastTime least_s = [&](double longest_s, double sum_s) {
    const double first_s = std::max(longest_s, sum_s / num_waits);
    if (num_others == 0) return time_s(first_s);
    return time_s(first_s) + num_others * time_s(std::max(0.0, sum_s - first_s) / num_others);
  };
  double step_s = 0;
  for (int32_t replica = 0; replica < step.topology.num_replicas(); ++replica)
    step_s = std::max(step_s, bound_of(step, step.topology, replica, num_waits, least_s));
  return step_s + input.num_micro_batches * step.cluster.fixed_s;
}

PlanPrediction prediction_of(const Plan& plan) {
  return {.predicted_time_s = predict_step(plan).total_s, .lower_bound_s = lower_bound_s(plan.input())};
}

}  // namespace knapformer
