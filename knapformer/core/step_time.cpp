#include "knapformer/core/step_time.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "knapformer/core/cluster.h"
#include "knapformer/core/error.h"

namespace knapformer {
namespace {

constexpr double kPublishedHostSPerPiece = 4.55e-6;  // fitted, see HardwareModel

// q, k and v travel before attention, its output after it: each as wide as the model.
constexpr double kPreAttnTensors = 3;
constexpr double kPostAttnTensors = 1;
constexpr double kBackwardOverForward = 2;
// route and reverse_route, each with its gradient. They lie outside of what is recomputed.
constexpr double kRoutesPerStep = 4;

void check(bool holds, std::string_view argument, double got, std::string_view expected) {
  if (!holds) throw_argument(argument, got, expected);
}

/// Bytes that one rank exchanges, by where the other end is. Both links work at once.
struct Traffic {
  double inside_bytes = 0;
  double between_bytes = 0;

  double total_bytes() const { return inside_bytes + between_bytes; }
  Traffic scaled(double by) const { return {inside_bytes * by, between_bytes * by}; }
  double seconds(const HardwareModel& hw) const {
    const double inside = inside_bytes > 0 ? hw.node_latency_s + inside_bytes / hw.node_bytes_per_s : 0;
    const double between = between_bytes > 0 ? hw.network_latency_s + between_bytes / hw.network_bytes_per_s : 0;
    return std::max(inside, between);
  }
};

/// One rank's load in one block.
struct RankLoad {
  double token_work = 0;  // FLOPs, forward
  double whole_attention_work = 0;
  double shared_attention_work = 0;
  Traffic numbers_wide;  // tokens that cross in each all-to-all, times d_model, in bytes
  double num_pieces = 0;
};

std::vector<RankLoad> loads_of(const Plan& plan, const HardwareModel& hw, const TrainedModel& model) {
  std::vector<RankLoad> loads(static_cast<size_t>(plan.num_ranks()));
  const PlanInput& input = plan.input();
  const auto row_bytes = static_cast<double>(input.d_model * model.bytes_per_number);
  for (const Chunk& chunk : plan.chunks()) {
    RankLoad& load = loads[chunk.rank.index()];
    const Placement& placement = plan.placement(chunk.sequence);
    const double attention_work = input.attention_work(chunk.sequence);
    load.token_work += input.workload.token_work(chunk.num_tokens, input.d_model);
    if (placement.degree == 1) {
      load.whole_attention_work += attention_work;
      continue;
    }
    load.shared_attention_work += attention_work / placement.degree;
    load.num_pieces += placement.degree;
    const int32_t node_first = chunk.rank.value / hw.ranks_per_node * hw.ranks_per_node;
    const int32_t first_inside = std::max(placement.first_rank.value, node_first);
    const int32_t last_inside = std::min(placement.first_rank.value + placement.degree, node_first + hw.ranks_per_node);
    const int32_t num_inside = last_inside - first_inside - 1;  // not counting itself
    const int32_t num_between = placement.degree - 1 - num_inside;
    const double bytes_per_peer = static_cast<double>(chunk.num_tokens) * row_bytes / placement.degree;
    load.numbers_wide.inside_bytes += num_inside * bytes_per_peer;
    load.numbers_wide.between_bytes += num_between * bytes_per_peer;
  }
  return loads;
}

struct AttentionPhase {
  double compute_s = 0;
  double exchange_s = 0;  // not hidden
  double seconds() const { return compute_s + exchange_s; }
};

AttentionPhase forward_attention(const RankTime& t, bool overlaps) {
  const double hidden_s = overlaps ? std::min(t.pre_attn_s, t.whole_attention_s) : 0;
  return {t.whole_attention_s + t.shared_attention_s, t.pre_attn_s + t.post_attn_s - hidden_s};
}

AttentionPhase backward_attention(const RankTime& t) {
  return {kBackwardOverForward * (t.whole_attention_s + t.shared_attention_s), t.pre_attn_s + t.post_attn_s};
}

/// The longest attention phase of the ranks [first, last).
template <class PhaseOf>
AttentionPhase longest(std::span<const RankTime> ranks, PhaseOf phase_of) {
  AttentionPhase longest;
  for (const RankTime& t : ranks) {
    const AttentionPhase phase = phase_of(t);
    if (phase.seconds() > longest.seconds()) longest = phase;
  }
  return longest;
}

/// What one block costs a group, over forward, recompute and backward.
struct BlockCost {
  double token_s = 0;
  double attention_s = 0;
  double exchange_s = 0;
  double host_s = 0;
  double seconds() const { return token_s + attention_s + exchange_s + host_s; }
};

double route_seconds(const Plan& plan, const HardwareModel& hw, const TrainedModel& model, StepTime& out) {
  const auto token_bytes =
      static_cast<double>(plan.input().d_model * model.bytes_per_number + model.side_bytes_per_token);
  std::vector<Traffic> sent(static_cast<size_t>(plan.num_ranks())), received(sent.size());
  for (const Chunk& chunk : plan.chunks()) {
    const Rank home = plan.seq_lens().home_of(chunk.sequence);
    if (home == chunk.rank) continue;
    const bool inside = home.value / hw.ranks_per_node == chunk.rank.value / hw.ranks_per_node;
    const double bytes = static_cast<double>(chunk.num_tokens) * token_bytes;
    const auto field = inside ? &Traffic::inside_bytes : &Traffic::between_bytes;
    sent[home.index()].*field += bytes;
    received[chunk.rank.index()].*field += bytes;
  }
  double slowest_s = 0;
  for (size_t r = 0; r < sent.size(); ++r) {
    slowest_s = std::max({slowest_s, sent[r].seconds(hw), received[r].seconds(hw)});
    out.route_bytes += kRoutesPerStep * sent[r].total_bytes();
    out.route_bytes_between_nodes += kRoutesPerStep * sent[r].between_bytes;
  }
  return kRoutesPerStep * slowest_s;
}

/// Seconds of FSDP's communication that the blocks do not hide, of all blocks. The next block's parameters are gathered
/// while one computes, and the last one's gradients reduced; the first gather and the last reduction have nothing to
/// hide behind. Gathers go around a ring, all-reduces over the copies along a tree.
double exposed_fsdp_seconds(int32_t num_ranks, const HardwareModel& hw, const TrainedModel& model,
                            double forward_block_s, double backward_block_s) {
  const int32_t shards = std::min(model.shard_ranks, num_ranks);
  const int32_t copies = (num_ranks + shards - 1) / shards;
  const double block_bytes = model.num_parameters / model.num_blocks * model.bytes_per_number;

  double gather_s = 0;
  if (shards > 1) {
    const int32_t nodes = (shards + hw.ranks_per_node - 1) / hw.ranks_per_node;
    const double inside_s = block_bytes * (shards - 1) / shards / hw.node_bytes_per_s;
    // A node's adapters together fetch what its ranks lack.
    const int32_t adapters = std::min(shards, hw.ranks_per_node);
    const double between_s = block_bytes * (nodes - 1) / nodes / (adapters * hw.network_bytes_per_s);
    gather_s = std::max(inside_s, between_s) + (nodes - 1) * hw.network_latency_s + hw.node_latency_s;
  }
  double all_reduce_s = 0;
  if (copies > 1) {
    const double bandwidth = num_ranks <= hw.ranks_per_node ? hw.node_bytes_per_s : hw.network_bytes_per_s;
    all_reduce_s = 2 * block_bytes / shards * (copies - 1) / copies / bandwidth +
                   2 * std::ceil(std::log2(copies)) * hw.network_latency_s;
  }
  const double reduce_s = gather_s + all_reduce_s;
  return gather_s + reduce_s +
         (model.num_blocks - 1) *
             (std::max(0.0, gather_s - forward_block_s) + std::max(0.0, gather_s + reduce_s - backward_block_s));
}

void validate(std::span<const RankCompute> measured, int32_t num_ranks) {
  if (!measured.empty() && std::ssize(measured) != num_ranks) {
    throw_argument("measured", text(measured.size(), " ranks"), text("none, or each of the ", num_ranks, " ranks"));
  }
  for (const RankCompute& rank : measured) {
    for (const double seconds : {rank.token_s, rank.whole_attention_s, rank.shared_attention_s}) {
      check_range("measured", seconds, 0);
    }
  }
}

}  // namespace

HardwareModel HardwareModel::published() {
  HardwareModel hardware;
  hardware.host_s_per_piece = kPublishedHostSPerPiece;
  return hardware;
}

void HardwareModel::validate() const {
  check_range("flops_per_s", flops_per_s, 1 / kMaxMagnitude);
  check(ranks_per_node >= 1, "ranks_per_node", ranks_per_node, "at least 1");
  check_range("node_bytes_per_s", node_bytes_per_s, 1 / kMaxMagnitude);
  check_range("network_bytes_per_s", network_bytes_per_s, 1 / kMaxMagnitude);
  check_range("node_latency_s", node_latency_s, 0);
  check_range("network_latency_s", network_latency_s, 0);
  check_range("fixed_s", fixed_s, 0);
  check_range("host_s_per_piece", host_s_per_piece, 0);
}

void TrainedModel::validate() const {
  check(num_blocks >= 1, "num_blocks", num_blocks, "at least 1");
  check_range("num_parameters", num_parameters, 0);
  check(bytes_per_number >= 1 && bytes_per_number <= 16, "bytes_per_number", bytes_per_number, "1 to 16");
  check(shard_ranks >= 1, "shard_ranks", shard_ranks, "at least 1");
  check(side_bytes_per_token >= 0, "side_bytes_per_token", side_bytes_per_token, "at least 0");
}

StepTime predict_step(const Plan& plan, const HardwareModel& hw, const TrainedModel& model,
                      std::span<const RankCompute> measured) {
  hw.validate();
  model.validate();
  validate(measured, plan.num_ranks());
  const std::vector<RankLoad> loads = loads_of(plan, hw, model);
  const std::vector<Rank> groups = predict_block_time(plan).group_of_rank;
  const double num_passes = model.recomputes ? 3 : 2;  // over the exchanges
  const double num_forwards = model.recomputes ? 2 : 1;

  StepTime out;
  out.ranks.resize(loads.size());
  double work = 0, measured_s = 0;
  for (size_t r = 0; r < loads.size(); ++r) {
    const RankLoad& load = loads[r];
    const double flops_per_s = hw.flops_per_s * plan.input().speed_of(Rank(r));
    const RankCompute compute = measured.empty()
                                    ? RankCompute{.token_s = load.token_work / flops_per_s,
                                                  .whole_attention_s = load.whole_attention_work / flops_per_s,
                                                  .shared_attention_s = load.shared_attention_work / flops_per_s}
                                    : measured[r];
    out.ranks[r] = {.group = groups[r].value,
                    .token_s = compute.token_s,
                    .pre_attn_s = load.numbers_wide.scaled(kPreAttnTensors).seconds(hw),
                    .whole_attention_s = compute.whole_attention_s,
                    .shared_attention_s = compute.shared_attention_s,
                    .post_attn_s = load.numbers_wide.scaled(kPostAttnTensors).seconds(hw)};
    work += load.token_work + load.whole_attention_work + load.shared_attention_work;
    measured_s += out.ranks[r].compute_s();
    const double exchanges = (kPreAttnTensors + kPostAttnTensors) * num_passes * model.num_blocks;
    out.attention_bytes += exchanges * load.numbers_wide.total_bytes();
    out.attention_bytes_between_nodes += exchanges * load.numbers_wide.between_bytes;
  }

  BlockCost slowest;
  for (size_t first = 0, last = 0; first < loads.size(); first = last) {
    for (last = first + 1; last < loads.size() && groups[last] == groups[first];) ++last;
    const std::span<RankTime> ranks = std::span(out.ranks).subspan(first, last - first);
    double token_s = 0, num_pieces = 0;
    for (size_t r = first; r < last; ++r) {
      token_s = std::max(token_s, out.ranks[r].token_s);
      num_pieces = std::max(num_pieces, loads[r].num_pieces);
    }
    const auto forward_of = [&](const RankTime& t) { return forward_attention(t, hw.overlaps_attention); };
    const AttentionPhase forward = longest(ranks, forward_of);
    const AttentionPhase backward = longest(ranks, backward_attention);
    for (RankTime& t : ranks) {
      t.wait_before_s = token_s - t.token_s;
      t.wait_after_s = forward.seconds() - forward_of(t).seconds();
    }
    const BlockCost block = {.token_s = (num_forwards + kBackwardOverForward) * token_s,
                             .attention_s = num_forwards * forward.compute_s + backward.compute_s,
                             .exchange_s = num_forwards * forward.exchange_s + backward.exchange_s,
                             .host_s = hw.host_s_per_piece * num_pieces};
    if (block.seconds() > slowest.seconds()) {
      slowest = block;
      out.slowest_group = Rank(first);
    }
  }
  out.token_s = slowest.token_s * model.num_blocks;
  out.attention_s = slowest.attention_s * model.num_blocks;
  out.exchange_s = slowest.exchange_s * model.num_blocks;
  out.host_s = slowest.host_s * model.num_blocks;
  out.route_s = route_seconds(plan, hw, model, out);
  const double forward_share = 1 / (num_forwards + kBackwardOverForward);
  out.fsdp_s = exposed_fsdp_seconds(plan.num_ranks(), hw, model, slowest.seconds() * forward_share,
                                    slowest.seconds() * (1 - forward_share));
  out.fixed_s = hw.fixed_s;
  const double ideal_forward_s =
      measured.empty() ? work / plan.input().total_speed() / hw.flops_per_s : measured_s / plan.num_ranks();
  out.ideal_s = ideal_forward_s * (num_forwards + kBackwardOverForward) * model.num_blocks;
  return out;
}

Plan plan_home(const PlanInput& input) {
  const int32_t num_ranks = input.seq_lens.num_ranks();
  PlanInput alone = input;
  alone.topology = Topology::parse(text("g1n", num_ranks));
  std::vector<Placement> placements;
  placements.reserve(input.seq_lens.lens().size());
  for (int32_t s = 0; s < input.seq_lens.num_sequences(); ++s) {
    const Rank home = input.seq_lens.home_of(SequenceId(s));
    placements.push_back({.bag = BagId(home.value), .first_rank = home, .degree = 1});
  }
  return Plan(std::move(alone), "home", std::move(placements));
}

}  // namespace knapformer
