#include "knapformer/core/planners/balanced/route_swaps.h"

#include <algorithm>
#include <functional>
#include <limits>

namespace knapformer {

RouteSwaps::RouteSwaps(const PlanInput& input, std::span<Placement> placements, int32_t replica)
    : input_(input),
      placements_(placements),
      num_ranks_(input.topology.num_ranks_per_replica()),
      first_rank_(replica * num_ranks_),
      traffic_(2 * static_cast<size_t>(num_ranks_)) {
  const auto [first, last] = input.sequences_of(replica);
  for (int32_t s = first.value; s < last.value; ++s) add(s, 1);
}

std::pair<double, int64_t> RouteSwaps::figures() const {
  double slowest_s = 0;
  for (const Traffic& traffic : traffic_) slowest_s = std::max(slowest_s, seconds(traffic));
  return {slowest_s, moved_};
}

void RouteSwaps::find_slowest() {
  std::vector<double> keys;
  for (const Traffic& traffic : traffic_) keys.push_back(-seconds(traffic));
  slowest_ = WinnerTree(keys);
}

double RouteSwaps::seconds(const Traffic& tokens) const {
  return std::max(tokens.inside / input_.cluster.node_bytes_per_s, tokens.between / input_.cluster.network_bytes_per_s);
}

void RouteSwaps::add(int32_t sequence, int32_t sign) {
  const Rank home = input_.seq_lens.home_of(SequenceId(sequence));
  const Placement& place = placements_[sequence];
  const int64_t share = sign * share_of(input_, SequenceId(sequence), place);
  for (int32_t r = place.first_rank.value; r < place.first_rank.value + place.degree; ++r) {
    if (r == home.value) continue;
    const auto link = input_.cluster.same_node(Rank(r), home) ? &Traffic::inside : &Traffic::between;
    traffic_[home.value - first_rank_].*link += static_cast<double>(share);
    traffic_[r - first_rank_ + num_ranks_].*link += static_cast<double>(share);
    moved_ += share;
  }
}

void RouteSwaps::run(std::span<Blocks> blocks, int64_t max_moved) {
  constexpr int64_t kPerSequence = 8, kNoLimit = std::numeric_limits<int64_t>::max();
  const auto [first, last] = input_.sequences_of(first_rank_ / num_ranks_);
  const int64_t num_sequences = last.value - first.value;
  max_moved_ = max_moved;
  find_slowest();
  const auto swap_all = [&](const auto& swap_one) {
    swapped_left_ = kPerSequence * num_sequences;
    while (slowest_.min() < 0 && swap_one()) {
    }
  };
  find_held();
  swap_all([&] { return swap_blocks(blocks); });
  const std::vector<Placement> before(placements_.begin() + first.value, placements_.begin() + last.value);
  find_loads();
  swap_all([&] { return swap_sequences(kNoLimit); });
  if (keeps_limit()) return;
  for (int32_t s = first.value; s < last.value; ++s) {
    add(s, -1);
    placements_[s] = before[s - first.value];
    add(s, 1);
  }
  find_slowest();
  find_held();
  find_loads();
  swap_all([&] { return swap_sequences(input_.max_tokens_per_rank); });
}

void RouteSwaps::find_held() {
  const auto [first, last] = input_.sequences_of(first_rank_ / num_ranks_);
  held_.assign(static_cast<size_t>(num_ranks_), {});
  for (int32_t s = first.value; s < last.value; ++s) held_[placements_[s].first_rank.value - first_rank_].push_back(s);
}

void RouteSwaps::find_loads() {
  const auto [first, last] = input_.sequences_of(first_rank_ / num_ranks_);
  loads_.assign(static_cast<size_t>(num_ranks_), {});
  for (int32_t s = first.value; s < last.value; ++s) {
    const int32_t begin = placements_[s].first_rank.value - first_rank_;
    for (int32_t i = begin; i < begin + placements_[s].degree; ++i) {
      loads_[i].shares |= placements_[s].degree > 1;
      loads_[i].tokens += input_.seq_lens[SequenceId(s)];
      loads_[i].work += input_.work(SequenceId(s)) / input_.speed_of(Rank(first_rank_ + i));
    }
  }
  max_work_ = 0;
  for (const Load& load : loads_) {
    if (!load.shares) max_work_ = std::max(max_work_, load.work);
  }
}

bool RouteSwaps::keeps_limit() const {
  return input_.max_tokens_per_rank == 0 || std::ranges::all_of(loads_, [&](const Load& load) {
           return load.shares || load.tokens <= input_.max_tokens_per_rank;
         });
}

bool RouteSwaps::swap_blocks(std::span<Blocks> blocks) {
  const int32_t rank = first_rank_ + slowest_.winner() % num_ranks_;
  block_swaps_.clear();
  const auto propose = [&](SequenceId id, Rank other) {
    for (Blocks& of_degree : blocks) {
      if (placements_[id.index()].degree > of_degree.degree) continue;
      const int32_t a = of_degree.of_rank[rank], b = of_degree.of_rank[other.index()];
      if (a < 0 || b < 0 || a == b || of_degree.class_of[a] != of_degree.class_of[b]) continue;
      block_swaps_.push_back({share_of(input_, id, placements_[id.index()]), &of_degree, a, b});
    }
  };
  const SequenceLengths& lengths = input_.seq_lens;
  for (SequenceId id = lengths.first_of(Rank(rank)); id < lengths.last_of(Rank(rank)); ++id.value)
    propose(id, placements_[id.index()].first_rank);
  if (slowest_.winner() >= num_ranks_) {  // by what it receives
    const Bag& bag = input_.topology.bag(input_.topology.bag_of(Rank(rank)));
    for (int32_t r = bag.first_rank.value; r <= rank; ++r) {
      for (const int32_t s : held_[r - first_rank_]) {
        if (r + placements_[s].degree > rank) propose(SequenceId(s), lengths.home_of(SequenceId(s)));
      }
    }
  }
  std::ranges::stable_sort(block_swaps_, std::greater{}, &BlockSwap::tokens);
  for (const auto& [tokens, of_degree, a, b] : block_swaps_) {
    list(*of_degree, a, in_a_);
    list(*of_degree, b, in_b_);
    if (!swap(of_degree->first_rank[b] - of_degree->first_rank[a])) continue;
    // The class of a smaller block depends on the larger sequences around it, which were swapped too.
    for (Blocks& smaller : blocks) {
      for (int32_t i = 0; smaller.degree < of_degree->degree && i < of_degree->degree; i += smaller.degree) {
        const int32_t from = smaller.of_rank[of_degree->first_rank[a] + i];
        const int32_t to = smaller.of_rank[of_degree->first_rank[b] + i];
        if (from >= 0 && to >= 0) std::swap(smaller.class_of[from], smaller.class_of[to]);
      }
    }
    return true;
  }
  return false;
}

void RouteSwaps::list(const Blocks& blocks, int32_t block, std::vector<int32_t>& sequences) const {
  sequences.clear();
  const int32_t first = blocks.first_rank[block];
  for (int32_t r = first; r < first + blocks.degree; ++r) {
    for (const int32_t s : held_[r - first_rank_]) {
      if (placements_[s].degree <= blocks.degree) sequences.push_back(s);
    }
  }
}

bool RouteSwaps::swap_sequences(int64_t max_tokens) {
  const Rank rank(first_rank_ + slowest_.winner() % num_ranks_);
  Load& here = loads_[rank.value - first_rank_];
  if (here.shares) return false;
  const SequenceLengths& lengths = input_.seq_lens;
  for (SequenceId id = lengths.first_of(rank); id < lengths.last_of(rank); ++id.value) {
    const Rank other = placements_[id.index()].first_rank;
    Load& there = loads_[other.value - first_rank_];
    if (other == rank || there.shares || input_.speed_of(other) != input_.speed_of(rank)) continue;
    for (const int32_t s : held_[rank.value - first_rank_]) {
      const SequenceId back(s);
      if (lengths.home_of(back) == rank) continue;
      const double more = (input_.work(id) - input_.work(back)) / input_.speed_of(rank);
      const int64_t more_tokens = lengths[id] - lengths[back];
      const double most = std::max({here.work, there.work, here.work + more, there.work - more});
      if (more != 0 && most > max_work_ * (1 - 1e-12)) continue;
      if (std::max(here.tokens + more_tokens, there.tokens - more_tokens) > max_tokens) continue;
      in_a_.assign(1, s);
      in_b_.assign(1, id.value);
      if (!swap(other.value - rank.value)) continue;
      here.work += more;
      there.work -= more;
      here.tokens += more_tokens;
      there.tokens -= more_tokens;
      return true;
    }
  }
  return false;
}

void RouteSwaps::shift(std::span<const int32_t> sequences, int32_t by) {
  for (const int32_t s : sequences) {
    add(s, -1);
    placements_[s].first_rank.value += by;
    add(s, 1);
  }
}

bool RouteSwaps::swap(int32_t distance) {
  swapped_left_ -= std::ssize(in_a_) + std::ssize(in_b_);
  if (swapped_left_ < 0) return false;
  touched_.clear();
  const auto touch = [&](int32_t s, int32_t by) {
    touched_.push_back(input_.seq_lens.home_of(SequenceId(s)).value - first_rank_);
    const int32_t first = placements_[s].first_rank.value - first_rank_ + num_ranks_;
    for (int32_t i = first; i < first + placements_[s].degree; ++i) touched_.insert(touched_.end(), {i, i + by});
  };
  for (const int32_t s : in_a_) touch(s, distance);
  for (const int32_t s : in_b_) touch(s, -distance);
  shift(in_a_, distance);
  shift(in_b_, -distance);
  double slowest = 0;
  for (const int32_t i : touched_) slowest = std::max(slowest, seconds(traffic_[i]));
  if (slowest >= -slowest_.min() * (1 - 1e-9) || moved_ > max_moved_) {
    shift(in_a_, -distance);
    shift(in_b_, distance);
    return false;
  }
  for (const int32_t i : touched_) slowest_.set(i, -seconds(traffic_[i]));
  hold(in_a_, distance);
  hold(in_b_, -distance);
  return true;
}

void RouteSwaps::hold(std::span<const int32_t> sequences, int32_t by) {
  for (const int32_t s : sequences) {
    Placement& place = placements_[s];
    place.bag = input_.topology.bag_of(place.first_rank);
    const int32_t now = place.first_rank.value - first_rank_;
    std::erase(held_[now - by], s);
    held_[now].push_back(s);
  }
}

}  // namespace knapformer
