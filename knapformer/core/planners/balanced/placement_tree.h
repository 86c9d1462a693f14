// Placement trees: the state that the balanced planner works on. Every bag of a replica is a tree of groups. The tree
// has the time of each connected group of ranks, which is updated when sequences are added or removed.
//
//   g8/4/2/1:                 [       8       ]            a node for every aligned group that may share a sequence;
//                             [   4   ][  4   ]            a sequence sits at the node of the group that shares it
//                             [ 2 ][ 2 ][ 2 ][ 2 ]
//                             [1][1][1][1][1][1][1][1]
//
// Note on time. If a node holds a sequence, all ranks below it are connected; so a connected group is a node with
// sequences that has no other such node above it. Its ranks wait for the longest per-token phase and the longest
// attention phase (cost/step_time.h). The per-token phase of the best cut is the largest, over the nodes v of the
// group, of (tokens at v and below) * seconds per token / (speed of v's ranks): docs/solver.md. Attention follows the
// heads: a rank is counted with the sum of the largest shares of the nodes above it, which is what the first rank of
// each group really has.
//
// Note on exchange. The exchange follows the chunks, and so the cut. The sequences of a node v fill its ranks up to one
// level of T_v tokens a rank. A connected subtree u below v already has one level of T_u tokens a rank, so its ranks
// get T_v - T_u tokens of v's sequences, with an exchange of x_v (T_v - T_u). So v needs from the nodes below it the
// maximum of (exchange - x T_u). Each node keeps this maximum for the x of every node above it: a few numbers, in
// `above`.
//
// Note on overlap. A rank's attention phase is  shared + post_attn + max(pre_attn, whole)  if attention on whole
// sequences hides pre_attn. With each term's maximum over the group's ranks, post_attn + max(whole + shared, shared +
// pre_attn) is an upper bound.
//
// If attention hides later stages of keys, none of these times is below the prediction of cost/step_time.h. They are
// equal if one rank of the group is the longest in every phase.
//
// A node's state follows from its children's states and its own sequences in a few operations, and a change of one node
// changes only that node and the nodes above it. Times are of a block, all passes, in units of the replica's ideal
// time over the number of micro-batches: with one, 1 is perfect balance without exchange.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "knapformer/core/plan/micro_batch_plan.h"
#include "knapformer/core/util/error.h"

namespace knapformer {

/// A sequence as the solver sees it.
struct TreeItem {
  SequenceId id;
  double tokens = 0;
  double attention = 0;  // whole, in time units at speed 1
};

class PlacementTrees {
 public:
  /// The number of nodes above a node whose exchanges are kept apart, from the root on. Those further down share
  /// the last place, which has the exchange of the nearest: with more than six degrees, times may be 0.2 % too low.
  static constexpr int32_t kMaxAbove = 5;

  struct Node {
    // Constant, except for the limit of tokens.
    int32_t degree = 1;
    int32_t parent = -1;
    int32_t first_child = 0;  // of no meaning without children
    int32_t num_children = 0;
    int32_t bag = 0;                        // within the replica, counted on through the micro-batches
    int32_t first_rank = 0;                 // of the whole group
    double time_per_token = 0;              // of the per-token phase, spread over the node's ranks
    double attention_share = 1;             // the largest share of a rank, over the slowest rank's speed
    double exchange_per_token = 0;          // of a chunk, on the rank that holds it
    double load_per_token = 0;              // per-token phase and exchange of each rank, if cut evenly
    double latency = 0;                     // of the exchanges of a group
    double head_start = 0;                  // what its micro-batch's level is below the highest: added to its times
    double token_capacity = kInfinity;      // see enforce_limit
    int32_t num_above = 0;                  // at most kMaxAbove
    double above_exchange[kMaxAbove] = {};  // exchange_per_token of the nodes above, the root first
  };

  /// The part of a node that changes. It is small, so that saving and restoring a path is cheap.
  struct State {
    double tokens = 0;     // of sequences at this node
    double attention = 0;  // on each rank, of sequences at this node
    double subtree_tokens = 0;
    double max_token_time = 0;
    double max_attention = 0;         // over ranks, from this node down
    double max_shared_attention = 0;  // the same, on shared sequences only
    double max_exchange = 0;
    double above[kMaxAbove] = {};  // see the note on exchange, by place
    double time = 0;               // of the slowest connected group
    double energy = 0;             // see set_reference
    int32_t num_sequences = 0;
  };

  /// Builds the trees of the replica's bags, which each of several micro-batches has. `stride`: of so many bags and of
  /// so many sequences one is taken, for a sample, which is not to be asked for placements.
  PlacementTrees(const PlanInput& input, int32_t replica, int32_t num_micro_batches = 1, int32_t stride = 1);
  /// Sets the time that each micro-batch is to take, its level. From now on a bag's time is that of its sequences and
  /// the highest level less its own, so that equal times are equally far above their levels. Call `clear` before times
  /// are read.
  void set_levels(std::span<const double> levels_s);

  /// The time unit, in seconds.
  double unit_s() const { return unit_s_; }
  int32_t num_bags() const { return static_cast<int32_t>(roots_.size()); }
  int32_t num_ranks_per_micro_batch() const { return num_ranks_per_micro_batch_; }
  int32_t num_nodes() const { return static_cast<int32_t>(nodes_.size()); }
  /// Descending by work, ties by id.
  std::span<const TreeItem> items() const { return items_; }
  /// All degrees of the replica, ascending.
  std::span<const int32_t> degrees() const { return degrees_; }
  const Node& node(int32_t v) const { return nodes_[v]; }
  const State& state(int32_t v) const { return states_[v]; }
  int32_t root(int32_t bag) const { return roots_[bag]; }
  /// Nodes of a bag with this degree: [first, last). Empty if the bag does not allow it.
  std::pair<int32_t, int32_t> nodes_of(int32_t bag, int32_t degree) const;
  double bag_time(int32_t bag) const { return state(root(bag)).time; }
  double slowest() const;
  /// From now on a group that exceeds the input's limit of tokens counts as slower than any that keeps it. Before, a
  /// limit changes nothing: so one that is kept anyway costs nothing.
  void enforce_limit();
  bool enforces_limit() const { return std::isfinite(nodes_[0].token_capacity); }
  /// Whether the tokens of every group are within the input's limit.
  bool keeps_limit() const;
  bool misses_enforced_limit() const { return enforces_limit() && !keeps_limit(); }

  /// Time that the item adds to each rank of the node, cut evenly.
  double cost(const TreeItem& item, int32_t v) const {
    const Node& n = node(v);
    return item.tokens * n.load_per_token + item.attention * n.attention_share;
  }

  void clear() { put({}); }
  /// Puts every item at its node, and takes all others out.
  void put(std::span<const int32_t> node_of_item);
  void add(const TreeItem& item, int32_t v) { change(item, v, 1.0); }
  void remove(const TreeItem& item, int32_t v) { change(item, v, -1.0); }
  /// Brings v alone up to date.
  void update(int32_t v);
  void update_bag(int32_t bag);
  void update_all();
  /// Time of the connected group that v is in. If v is in none, the time as if v were one.
  double group_time(int32_t v) const;
  /// The load of v's fullest rank, as if all sequences above v were cut evenly. It tells the ranks of one connected
  /// group apart.
  double load(int32_t v) const {
    double load = node(v).head_start + state(v).max_token_time + state(v).max_attention + state(v).max_exchange;
    for (int32_t x = node(v).parent; x >= 0; x = node(x).parent)
      load += state(x).tokens * node(x).load_per_token + state(x).attention;
    return load;
  }

  /// Energy: the sum over ranks of ((time of the rank's group - floor) / (reference - floor))^16, or 0 below the floor.
  /// The slowest groups dominate its gradient, the more so the closer the floor is to the reference.
  void set_reference(double floor, double reference);

  /// A lower bound of the energy of v's bag after v gets `more`, and `from` gives as much, in a few operations. 0 where
  /// both are in one connected group.
  double least_energy(const TreeItem& more, int32_t v, int32_t from) const;

  /// The nodes that a change of one or two nodes affects: these and the nodes above them, each once, children before
  /// parents. With their states before the change, for restore.
  static constexpr int32_t kMaxDepth = 24;
  struct Paths {
    int32_t count = 0;
    int32_t nodes[2 * kMaxDepth];
    State states[2 * kMaxDepth];
  };
  void save(int32_t a, int32_t b, Paths& out) const;
  void update(const Paths& paths) {
    for (int32_t i = 0; i < paths.count; ++i) update(paths.nodes[i]);
  }
  void restore(const Paths& paths) {
    for (int32_t i = 0; i < paths.count; ++i) states_[paths.nodes[i]] = paths.states[i];
  }

  Placement placement(int32_t v) const;
  int32_t micro_batch_of(int32_t bag) const { return bag / num_bags_per_micro_batch_; }
  /// The node of a placement.
  int32_t node_of(const Placement& place) const;

 private:
  void add_shape(const BagShape& shape);
  void add_bag(const PlanInput& input, const AttentionShares& shares, const Bag& bag);
  double energy_of_rank(double time) const {
    double x = std::max(0.0, time - floor_) * inverse_range_;
    x *= x;
    x *= x;
    x *= x;
    return x * x;
  }
  /// The attention and the exchange of a connected group, without the part that is hidden.
  double attention_phase(const State& group) const;
  void change(const TreeItem& item, int32_t v, double sign);

  int64_t max_tokens_per_rank_ = 0;
  double unit_s_ = 1;
  double floor_ = 0;
  double inverse_range_ = 1;
  /// How the attention and the exchange of a block divide over its passes. See attention_phase.
  struct Overlap {
    double pre_attn = 0;  // part of the exchange; 0 if nothing hides it
    double forward_attention = 0, backward_attention = 0;
    double forward_exchange = 0, backward_exchange = 0;
  };
  Overlap overlap_;
  int32_t first_bag_ = 0, num_bags_per_micro_batch_ = 0, num_ranks_per_micro_batch_ = 0;
  std::vector<Node> nodes_;
  std::vector<State> states_;
  std::vector<int32_t> roots_;
  std::vector<int32_t> shape_of_bag_;
  /// Per shape and degree of the shape (ascending): the offset of the first node from the root.
  struct NodesOfDegree {
    int32_t degree, offset, count;
  };
  std::vector<std::vector<NodesOfDegree>> nodes_by_degree_;
  std::vector<int32_t> degrees_;
  std::vector<TreeItem> items_;
};

inline void PlacementTrees::change(const TreeItem& item, int32_t v, double sign) {
  State& state = states_[v];
  state.num_sequences += sign > 0 ? 1 : -1;
  state.tokens += sign * item.tokens;  // integers: exact
  state.attention += sign * item.attention * node(v).attention_share;
  if (state.num_sequences == 0) state.attention = 0;  // leave no rounding behind
}

inline void PlacementTrees::save(int32_t a, int32_t b, Paths& out) const {
  out.count = 0;
  const auto climb = [&](int32_t& v) {
    out.nodes[out.count] = v;
    out.states[out.count++] = state(v);
    v = node(v).parent;
  };
  if (node(a).bag != node(b).bag) {
    while (b >= 0) climb(b);
  }
  while (b >= 0 && a != b) climb(node(a).degree <= node(b).degree ? a : b);
  while (a >= 0) climb(a);
}

inline double PlacementTrees::least_energy(const TreeItem& more, int32_t v, int32_t from) const {
  int32_t top = v;  // of the connected group
  double attention = state(v).max_attention + more.attention * node(v).attention_share;
  double token_time = (state(v).subtree_tokens + more.tokens) * node(v).time_per_token;
  for (int32_t x = node(v).parent; x >= 0; x = node(x).parent) {
    if (state(x).num_sequences == 0) continue;
    top = x;
    attention += state(x).attention;
    token_time = std::max(token_time, (state(x).subtree_tokens + more.tokens) * node(x).time_per_token);
  }
  const Node& n = node(top);
  double others = state(root(n.bag)).energy - state(top).energy;
  if (node(from).bag == n.bag) {
    int32_t top_from = from;
    for (int32_t x = from; x >= 0; x = node(x).parent) {
      if (x == top) return 0;
      if (state(x).num_sequences > 0) top_from = x;
    }
    others -= state(top_from).energy;
  }
  return others + n.degree * energy_of_rank(n.head_start + token_time + attention);
}

inline double PlacementTrees::attention_phase(const State& group) const {
  if (overlap_.pre_attn == 0) return group.max_attention + group.max_exchange;
  const auto pass = [&](double part_of_attention, double part_of_exchange) {
    const double part = group.max_exchange * part_of_exchange;
    return std::max(group.max_attention * part_of_attention + part * (1 - overlap_.pre_attn),
                    group.max_shared_attention * part_of_attention + part);
  };
  return pass(overlap_.forward_attention, overlap_.forward_exchange) +
         pass(overlap_.backward_attention, overlap_.backward_exchange);
}

inline void PlacementTrees::update(int32_t v) {
  const Node& n = node(v);
  State& state = states_[v];
  const bool shared = state.num_sequences > 0;
  const int32_t place = std::min(n.num_above, kMaxAbove - 1);  // its own, in the nodes below
  const State* const children = states_.data() + n.first_child;
  double tokens = state.tokens, token_time = 0, attention = 0, shared_attention = 0, exchange = 0;
  double time = 0, energy = 0;
  for (int32_t i = 0; i < n.num_children; ++i) {
    const State& child = children[i];
    tokens += child.subtree_tokens;
    token_time = std::max(token_time, child.max_token_time);
    attention = std::max(attention, child.max_attention);
    shared_attention = std::max(shared_attention, child.max_shared_attention);
    exchange = std::max(exchange, child.max_exchange);
    time = std::max(time, child.time);
    energy += child.energy;
  }
  const double tokens_per_rank = tokens / n.degree;
  state.subtree_tokens = tokens;
  token_time = std::max(token_time, tokens * n.time_per_token);
  // A plan beyond the capacity is of no use. It counts as worse than any plan within it, and as slightly worse the
  // further it is beyond. If this slope were steep, no search would get from such a plan over a worse one to a good
  // one.
  constexpr double kOverfullTime = 10;
  if (tokens > n.token_capacity) token_time += kOverfullTime + tokens / n.token_capacity;
  state.max_token_time = token_time;

  attention += state.attention;
  if (n.degree > 1) shared_attention += state.attention;
  state.max_attention = attention;
  state.max_shared_attention = shared_attention;

  const double filled = n.exchange_per_token * tokens_per_rank;
  if (n.num_children == 0) {
    exchange = filled;
  } else if (shared) {
    for (int32_t i = 0; i < n.num_children; ++i) exchange = std::max(exchange, children[i].above[place] + filled);
  }
  state.max_exchange = exchange;

  if (shared || n.num_children == 0) {
    for (int32_t k = 0; k < n.num_above; ++k) state.above[k] = exchange - n.above_exchange[k] * tokens_per_rank;
    time = n.head_start + token_time + attention_phase(state) + (shared ? n.latency : 0);
    state.time = time;
    state.energy = n.degree * energy_of_rank(time);
    return;
  }
  for (int32_t k = 0; k < n.num_above; ++k) {
    double above = children[0].above[k];
    for (int32_t i = 1; i < n.num_children; ++i) above = std::max(above, children[i].above[k]);
    state.above[k] = above;
  }
  state.time = time;
  state.energy = energy;
}

}  // namespace knapformer
