#include "knapformer/core/flat_bound.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "knapformer/core/lower_bound.h"

namespace knapformer {
namespace {

/// Of what is proven from sums that may round.
constexpr double kRounding = 1 + 1e-9;

std::span<const Bag> bags_of(const Topology& topology, int32_t replica) {
  const auto num_bags = static_cast<size_t>(topology.num_bags_per_replica());
  return topology.bags().subspan(static_cast<size_t>(replica) * num_bags, num_bags);
}

/// Bags of one size.
struct Shape {
  double bag_speed = 0, total_speed = 0;  // of the fastest bag, and of all
  double exchange_s_per_token = std::numeric_limits<double>::infinity();
  double price = 1, wanted_s = 0;
};

std::vector<Shape> shapes_of(const PlanInput& input, const Topology& topology, int32_t replica) {
  std::vector<Shape> shapes(topology.shapes().size());
  for (const Bag& bag : bags_of(topology, replica)) {
    Shape& shape = shapes[static_cast<size_t>(bag.shape)];
    const double speed = input.group_speed(bag.first_rank, bag.num_ranks).sum;
    shape.bag_speed = std::max(shape.bag_speed, speed);
    shape.total_speed += speed;
    shape.exchange_s_per_token = std::min(
        shape.exchange_s_per_token, input.cluster.exchange_s_per_token(bag.first_rank, bag.num_ranks, input.d_model));
  }
  return shapes;
}

/// A sequence, in rank time weighed by speed, as in lower_bound.cpp: exchange counts times the lowest speed.
struct Item {
  double work_s = 0;
  double weighed_tokens = 0;  // times the lowest speed

  double seconds_in(const Shape& shape) const { return work_s + weighed_tokens * shape.exchange_s_per_token; }
};

std::vector<Item> items_of(const PlanInput& input, const Topology& topology, int32_t replica) {
  const int32_t num_ranks = topology.num_ranks_per_replica();
  const double slowest = input.group_speed(Rank(replica * num_ranks), num_ranks).slowest;
  const auto [first, last] = input.sequences_of(replica);
  std::vector<Item> items;
  items.reserve(last.index() - first.index());
  for (int32_t s = first.value; s < last.value; ++s) {
    const SequenceId id(s);
    items.push_back({.work_s = input.work(id) / input.cluster.flops_per_s,
                     .weighed_tokens = static_cast<double>(input.seq_lens[id]) * slowest});
  }
  return items;
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

/// Let rank time have a price in the bags of each shape. Every sequence takes at least what is cheapest of the shapes
/// that it fits, and together they take at most `time_s` of every rank. Where that does not add up, whatever the
/// prices, there is no such plan: false. Prices that show it rise where more is wanted than there is.
bool may_be_paid(std::span<const Item> items, std::vector<Shape> shapes, double time_s) {
  constexpr int kMostRounds = 8;
  for (int round = 0; round < kMostRounds; ++round) {
    double cost = 0, worth = 0;
    for (Shape& shape : shapes) {
      worth += shape.price * shape.total_speed * time_s;
      shape.wanted_s = 0;
    }
    for (const Item& item : items) {
      Shape* best = nullptr;
      double least = 0, least_s = 0;
      for (Shape& shape : shapes) {
        const double shape_s = item.seconds_in(shape);
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

}  // namespace

bool flat_may_take_less(const PlanInput& input, const Topology& topology, int32_t replica, double time_s) {
  if (replica_lower_bound_s(input, topology, replica) >= time_s) return false;
  const std::vector<Item> items = items_of(input, topology, replica);
  std::vector<Shape> shapes = shapes_of(input, topology, replica);
  if (shapes.size() > 1) return may_be_paid(items, std::move(shapes), time_s);
  const Shape& shape = shapes.front();
  std::vector<double> seconds;
  seconds.reserve(items.size());
  for (const Item& item : items) seconds.push_back(item.seconds_in(shape));
  return may_be_packed(std::move(seconds), bags_of(topology, replica).size(), time_s * shape.bag_speed * kRounding);
}

double flat_lower_bound_s(const PlanInput& input, const Topology& topology, int32_t replica,
                          std::span<const Placement> placements) {
  const auto bags = bags_of(topology, replica);
  const BagId first_bag = topology.bag_of(bags.front().first_rank);
  const auto [first, last] = input.sequences_of(replica);
  std::vector<double> work(bags.size()), tokens(bags.size());
  for (int32_t s = first.value; s < last.value; ++s) {
    const auto bag = static_cast<size_t>(placements[static_cast<size_t>(s)].bag.value - first_bag.value);
    work[bag] += input.work(SequenceId(s));
    tokens[bag] += static_cast<double>(input.seq_lens[SequenceId(s)]);
  }
  double bound_s = 0;
  for (size_t b = 0; b < bags.size(); ++b) {
    const PlanInput::GroupSpeed speed = input.group_speed(bags[b].first_rank, bags[b].num_ranks);
    const double exchange = input.cluster.exchange_s_per_token(bags[b].first_rank, bags[b].num_ranks, input.d_model);
    bound_s =
        std::max(bound_s, (work[b] / input.cluster.flops_per_s + tokens[b] * exchange * speed.slowest) / speed.sum);
  }
  return bound_s;
}

}  // namespace knapformer
