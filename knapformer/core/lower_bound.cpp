#include "knapformer/core/lower_bound.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <utility>
#include <vector>

namespace knapformer {
namespace {

/// What a group of ranks offers a sequence; of a degree, the best that any group of the replica does.
struct Offer {
  double speed = 0;                                                       // summed
  double exchange_s_per_token = std::numeric_limits<double>::infinity();  // tokens of a chunk
};

/// Of consecutive ranks: the sum of their speeds, and the lowest.
std::pair<double, double> speeds_of(const PlanInput& input, Rank first, int32_t num_ranks) {
  double sum = 0, lowest = std::numeric_limits<double>::infinity();
  for (int32_t r = first.value; r < first.value + num_ranks; ++r) {
    sum += input.speed_of(Rank(r));
    lowest = std::min(lowest, input.speed_of(Rank(r)));
  }
  return {sum, lowest};
}

/// By rising degree.
std::vector<Offer> offers_of(const PlanInput& input, const Topology& topology, int32_t replica) {
  std::map<int32_t, Offer> offers;
  const auto num_bags = static_cast<size_t>(topology.num_bags_per_replica());
  for (const Bag& bag : topology.bags().subspan(static_cast<size_t>(replica) * num_bags, num_bags)) {
    for (const int32_t degree : topology.shapes()[static_cast<size_t>(bag.shape)].degrees) {
      Offer& best = offers[degree];
      for (int32_t r = bag.first_rank.value; r < bag.first_rank.value + bag.num_ranks; r += degree) {
        best.speed = std::max(best.speed, speeds_of(input, Rank(r), degree).first);
        best.exchange_s_per_token =
            std::min(best.exchange_s_per_token, input.cluster.exchange_s_per_token(Rank(r), degree, input.d_model));
      }
    }
  }
  std::vector<Offer> out;
  for (const auto& [degree, offer] : offers) out.push_back(offer);
  return out;
}

/// Whether the items fit into so many bags of one capacity: false is proven. Items above capacity - l share no bag with
/// one of l or more, so all others of l or more have to fit into the other bags; for every l (as Martello and Toth's
/// bound L2, 1990). O(n log n).
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

}  // namespace

double replica_lower_bound_s(const PlanInput& input, const Topology& topology, int32_t replica) {
  const int32_t num_ranks = topology.num_ranks_per_replica();
  const Rank first_rank(replica * num_ranks), last_rank((replica + 1) * num_ranks - 1);
  const SequenceId first = input.seq_lens.first_of(first_rank), last = input.seq_lens.last_of(last_rank);
  if (first == last) return 0;
  const std::vector<Offer> offers = offers_of(input, topology, replica);
  // Exchange does not run faster on a faster rank. Rank time weighed by speed, as the sum below has it, counts it times
  // the speed of the rank that spends it, which is at least the lowest.
  const auto [total_speed, min_speed] = speeds_of(input, first_rank, num_ranks);

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

bool flat_may_take_less(const PlanInput& input, const Topology& topology, int32_t replica, double time_s) {
  if (replica_lower_bound_s(input, topology, replica) >= time_s) return false;
  // Let rank time have a price in the bags of each shape. Every sequence takes at least what is cheapest of the shapes
  // that it fits, and together they take at most `time_s` of every rank. Where that does not add up, whatever the
  // prices, there is no such plan. Prices that show it rise where more is wanted than there is.
  constexpr int kMostRounds = 8;
  constexpr double kRounding = 1 + 1e-9;
  struct Shape {
    double bag_speed = 0, total_speed = 0;
    double exchange_s_per_token = std::numeric_limits<double>::infinity();
    double price = 1, wanted_s = 0;
  };
  std::vector<Shape> shapes(topology.shapes().size());
  const auto num_bags = static_cast<size_t>(topology.num_bags_per_replica());
  const auto bags = topology.bags().subspan(static_cast<size_t>(replica) * num_bags, num_bags);
  for (const Bag& bag : bags) {
    Shape& shape = shapes[static_cast<size_t>(bag.shape)];
    const double speed = speeds_of(input, bag.first_rank, bag.num_ranks).first;
    shape.bag_speed = std::max(shape.bag_speed, speed);
    shape.total_speed += speed;
    shape.exchange_s_per_token = std::min(
        shape.exchange_s_per_token, input.cluster.exchange_s_per_token(bag.first_rank, bag.num_ranks, input.d_model));
  }
  const Rank first_rank = bags.front().first_rank, last_rank(first_rank.value + topology.num_ranks_per_replica() - 1);
  const double min_speed = speeds_of(input, first_rank, topology.num_ranks_per_replica()).second;
  const SequenceId first = input.seq_lens.first_of(first_rank), last = input.seq_lens.last_of(last_rank);
  if (shapes.size() == 1) {
    std::vector<double> seconds;
    for (int32_t s = first.value; s < last.value; ++s) {
      seconds.push_back(input.work(SequenceId(s)) / input.cluster.flops_per_s +
                        static_cast<double>(input.seq_lens[SequenceId(s)]) * min_speed *
                            shapes.front().exchange_s_per_token);
    }
    return may_be_packed(std::move(seconds), num_bags, time_s * shapes.front().bag_speed * kRounding);
  }
  for (int round = 0; round < kMostRounds; ++round) {
    double cost = 0, worth = 0;
    for (Shape& shape : shapes) {
      worth += shape.price * shape.total_speed * time_s;
      shape.wanted_s = 0;
    }
    for (int32_t s = first.value; s < last.value; ++s) {
      const double work_s = input.work(SequenceId(s)) / input.cluster.flops_per_s;
      const double exchange = static_cast<double>(input.seq_lens[SequenceId(s)]) * min_speed;
      Shape* best = nullptr;
      double least = 0, least_s = 0;
      for (Shape& shape : shapes) {
        const double shape_s = work_s + exchange * shape.exchange_s_per_token;
        if (shape_s > time_s * shape.bag_speed * kRounding) continue;
        if (best != nullptr && shape.price * shape_s >= least) continue;
        best = &shape;
        least = shape.price * shape_s;
        least_s = shape_s;
      }
      if (best == nullptr) return false;
      best->wanted_s += least_s;
      cost += least;
    }
    if (cost > worth * kRounding) return false;
    for (Shape& shape : shapes)
      shape.price *= 1 + (std::min(shape.wanted_s / (shape.total_speed * time_s), 2.0) - 1) / (4 + 4 * round);
  }
  return true;
}

double flat_lower_bound_s(const PlanInput& input, const Topology& topology, int32_t replica,
                          std::span<const Placement> placements) {
  const auto num_bags = static_cast<size_t>(topology.num_bags_per_replica());
  const auto bags = topology.bags().subspan(static_cast<size_t>(replica) * num_bags, num_bags);
  const BagId first_bag = topology.bag_of(bags.front().first_rank);
  const SequenceId first = input.seq_lens.first_of(bags.front().first_rank);
  const SequenceId last = input.seq_lens.last_of(Rank(bags.back().first_rank.value + bags.back().num_ranks - 1));
  std::vector<double> work(num_bags), tokens(num_bags);
  for (int32_t s = first.value; s < last.value; ++s) {
    const auto bag = static_cast<size_t>(placements[static_cast<size_t>(s)].bag.value - first_bag.value);
    work[bag] += input.work(SequenceId(s));
    tokens[bag] += static_cast<double>(input.seq_lens[SequenceId(s)]);
  }
  double bound_s = 0;
  for (size_t b = 0; b < num_bags; ++b) {
    const auto [speed, min_speed] = speeds_of(input, bags[b].first_rank, bags[b].num_ranks);
    const double exchange = input.cluster.exchange_s_per_token(bags[b].first_rank, bags[b].num_ranks, input.d_model);
    bound_s = std::max(bound_s, (work[b] / input.cluster.flops_per_s + tokens[b] * exchange * min_speed) / speed);
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
