#include "knapformer/core/planners/balanced/placement_tree.h"

#include <algorithm>

#include "knapformer/core/cost/step_time.h"
#include "knapformer/core/util/error.h"

namespace knapformer {
namespace {

/// Of each shape, every stride-th bag of the replica.
std::vector<BagId> sampled_bags(const Topology& topology, int32_t replica, int32_t stride) {
  std::vector<BagId> sampled;
  const int32_t num_bags = topology.num_bags_per_replica(), first = replica * num_bags;
  for (int32_t b = first, in_shape = 0; b < first + num_bags; ++b, ++in_shape) {
    if (b > first && topology.bag(BagId(b)).shape != topology.bag(BagId(b - 1)).shape) in_shape = 0;
    if (in_shape % stride == 0) sampled.push_back(BagId(b));
  }
  return sampled;
}

/// The replica's sequences by descending work; for a part of its ranks as large a part of them, evenly spread.
std::vector<SequenceId> sampled_sequences(const PlanInput& input, int32_t replica, int64_t num_ranks) {
  const int64_t num_all = input.topology.num_ranks_per_replica();
  std::vector<SequenceId> sampled;
  const std::vector<SequenceId> order = input.by_descending_work(replica);
  for (int64_t i = 0; i < std::ssize(order); ++i) {
    if (i == 0 || i * num_ranks / num_all != (i - 1) * num_ranks / num_all) sampled.push_back(order[i]);
  }
  return sampled;
}

}  // namespace

PlacementTrees::PlacementTrees(const PlanInput& input, int32_t replica, int32_t num_micro_batches, int32_t stride)
    : max_tokens_per_rank_(input.max_tokens_per_rank) {
  const Topology& topology = input.topology;
  const int32_t num_ranks = topology.num_ranks_per_replica();
  const auto [first, last] = input.sequences_of(replica);

  const BlockRates rates(input);
  double total_s = 0;
  for (int32_t s = first.value; s < last.value; ++s) total_s += rates.work_s(input, SequenceId(s));
  const double total_speed = input.group_speed(Rank(replica * num_ranks), num_ranks).sum;
  unit_s_ = total_s > 0 ? total_s / total_speed / num_micro_batches : 1;

  const std::vector<BagId> bags = sampled_bags(topology, replica, stride);
  first_bag_ = replica * topology.num_bags_per_replica();
  num_bags_per_micro_batch_ = static_cast<int32_t>(bags.size());
  for (const BagId bag : bags) num_ranks_per_micro_batch_ += topology.bag(bag).num_ranks;
  for (const SequenceId s : sampled_sequences(input, replica, num_ranks_per_micro_batch_)) {
    items_.push_back({.id = s,
                      .tokens = static_cast<double>(input.seq_lens[s]),
                      .attention = input.pairs_of(s) * rates.pair_s / unit_s_});
  }
  const Passes passes = input.model.passes();
  if (input.cluster.overlaps_attention) {
    overlap_ = {.pre_attn = 0.75,  // q, k and v of four tensors; more where queries are cut
                .forward_attention = passes.forwards / passes.attention(),
                .backward_attention = passes.attention_backward / passes.attention(),
                .forward_exchange = passes.forwards / passes.exchanges(),
                .backward_exchange = passes.backwards / passes.exchanges()};
  }

  for (const BagShape& shape : topology.shapes()) add_shape(shape);
  std::sort(degrees_.begin(), degrees_.end());
  degrees_.erase(std::unique(degrees_.begin(), degrees_.end()), degrees_.end());

  const AttentionShares shares = input.attention_shares();
  for (int32_t k = 0; k < num_micro_batches; ++k) {
    for (const BagId bag : bags) add_bag(input, shares, topology.bag(bag));
  }
  states_.resize(nodes_.size());
  update_all();
}

void PlacementTrees::set_levels(std::span<const double> levels_s) {
  const double highest_s = std::ranges::max(levels_s);
  for (Node& n : nodes_) n.head_start = (highest_s - levels_s[micro_batch_of(n.bag)]) / unit_s_;
}

void PlacementTrees::add_shape(const BagShape& shape) {
  auto& by_degree = nodes_by_degree_.emplace_back();
  int32_t offset = 0;
  for (auto degree = shape.degrees.rbegin(); degree != shape.degrees.rend(); ++degree) {
    const int32_t count = shape.num_ranks_per_bag() / *degree;
    by_degree.push_back({.degree = *degree, .offset = offset, .count = count});
    offset += count;
    degrees_.push_back(*degree);
  }
  std::reverse(by_degree.begin(), by_degree.end());
}

void PlacementTrees::add_bag(const PlanInput& input, const AttentionShares& shares, const Bag& bag) {
  const auto root = static_cast<int32_t>(nodes_.size()), index = static_cast<int32_t>(roots_.size());
  roots_.push_back(root);
  shape_of_bag_.push_back(bag.shape);
  const auto& by_degree = nodes_by_degree_[bag.shape];
  const double time_per_token = BlockRates(input).token_s / unit_s_;
  const double num_exchanges = 2 * input.model.passes().exchanges();  // before and after attention
  KNAPFORMER_ASSERT(by_degree.size() <= static_cast<size_t>(kMaxDepth));
  for (size_t k = by_degree.size(); k-- > 0;) {  // from the root down
    const NodesOfDegree& nodes = by_degree[k];
    for (int32_t i = 0; i < nodes.count; ++i) {
      Node n;
      n.degree = nodes.degree;
      n.bag = index;
      n.first_rank = bag.first_rank.value + i * nodes.degree;
      if (k + 1 < by_degree.size())
        n.parent = root + by_degree[k + 1].offset + i / (by_degree[k + 1].degree / nodes.degree);
      if (k > 0) {
        n.num_children = nodes.degree / by_degree[k - 1].degree;
        n.first_child = root + by_degree[k - 1].offset + i * n.num_children;
      }
      const PlanInput::GroupSpeed speed = input.group_speed(Rank(n.first_rank), n.degree);
      n.time_per_token = time_per_token / speed.sum;
      const AttentionCut cut = input.attention_cut(n.degree);
      n.attention_share = shares.max(n.degree) * cut.attention_factor() / speed.slowest;
      const SentRows rows = sent_range(input.cluster, shares, Rank(n.first_rank), n.degree).max;
      const Traffic sent = rows.sum() - rows.keys() * cut.part_of_later_stages();  // which hide behind attention
      n.exchange_per_token = exchange_s(input, sent).slower() / unit_s_;
      n.latency = num_exchanges / unit_s_ *
                  std::max(sent.inside > 0 ? input.cluster.node_latency_s : 0,
                           sent.between > 0 ? input.cluster.network_latency_s : 0);
      n.load_per_token = n.time_per_token + n.exchange_per_token / n.degree;
      if (n.parent >= 0) {
        const Node& parent = nodes_[n.parent];
        std::copy(std::begin(parent.above_exchange), std::end(parent.above_exchange), std::begin(n.above_exchange));
        n.num_above = std::min(parent.num_above + 1, kMaxAbove);
        n.above_exchange[n.num_above - 1] = parent.exchange_per_token;
      }
      nodes_.push_back(n);
    }
  }
}

std::pair<int32_t, int32_t> PlacementTrees::nodes_of(int32_t bag, int32_t degree) const {
  for (const NodesOfDegree& nodes : nodes_by_degree_[shape_of_bag_[bag]]) {
    if (nodes.degree == degree) return {root(bag) + nodes.offset, root(bag) + nodes.offset + nodes.count};
  }
  return {0, 0};
}

void PlacementTrees::enforce_limit() {
  for (Node& n : nodes_) n.token_capacity = static_cast<double>(max_tokens_per_rank_) * n.degree;
  update_all();
}

double PlacementTrees::slowest() const {
  double time = 0;
  for (const int32_t root : roots_) time = std::max(time, state(root).time);
  return time;
}

bool PlacementTrees::keeps_limit() const {
  if (max_tokens_per_rank_ == 0) return true;
  for (int32_t v = 0; v < num_nodes(); ++v) {
    if (state(v).subtree_tokens > static_cast<double>(max_tokens_per_rank_) * node(v).degree) return false;
  }
  return true;
}

void PlacementTrees::put(std::span<const int32_t> node_of_item) {
  for (State& state : states_) state = {};
  for (size_t i = 0; i < node_of_item.size(); ++i) add(items_[i], node_of_item[i]);
  update_all();
}

void PlacementTrees::update_all() {
  for (int32_t v = num_nodes() - 1; v >= 0; --v) update(v);  // children come after their parent
}

void PlacementTrees::update_bag(int32_t bag) {
  const auto b = static_cast<size_t>(bag);
  const int32_t end = b + 1 < roots_.size() ? roots_[b + 1] : num_nodes();
  for (int32_t v = end - 1; v >= roots_[b]; --v) update(v);
}

double PlacementTrees::group_time(int32_t v) const {
  int32_t top = v;  // the largest group around v that holds a sequence
  for (int32_t x = node(v).parent; x >= 0; x = node(x).parent) {
    if (state(x).num_sequences > 0) top = x;
  }
  return node(top).head_start + state(top).max_token_time + attention_phase(state(top)) + node(top).latency;
}

void PlacementTrees::set_reference(double floor, double reference) {
  floor_ = floor;
  inverse_range_ = 1 / (reference - floor);
  update_all();
}

Placement PlacementTrees::placement(int32_t v) const {
  const Node& n = node(v);
  return {.bag = BagId(first_bag_ + n.bag % num_bags_per_micro_batch_),
          .first_rank = Rank(n.first_rank),
          .degree = n.degree};
}

int32_t PlacementTrees::node_of(const Placement& place) const {
  const int32_t bag = place.bag.value - first_bag_;
  const auto [first, last] = nodes_of(bag, place.degree);
  KNAPFORMER_ASSERT(first < last);
  return first + (place.first_rank.value - node(root(bag)).first_rank) / place.degree;
}

}  // namespace knapformer
