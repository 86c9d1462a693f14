#include "knapformer/core/cost/step_time.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "knapformer/core/util/error.h"

namespace knapformer {
namespace {

/// Consecutive tokens with the same traffic are counted first and multiplied once: so where all tokens of a rank have
/// the same traffic, as in a flat bag, the sum does not depend on the order of sequences.
class TrafficSum {
 public:
  void add(int64_t tokens, const Traffic& per_token) {
    if (per_token.inside != per_token_.inside || per_token.between != per_token_.between) {
      earlier_ = sum();
      tokens_ = 0;
      per_token_ = per_token;
    }
    tokens_ += tokens;
  }
  Traffic sum() const { return earlier_ + per_token_ * static_cast<double>(tokens_); }

 private:
  Traffic earlier_, per_token_;
  int64_t tokens_ = 0;
};

/// One rank's load in one block.
struct RankLoad {
  int64_t tokens = 0;
  double whole_pairs = 0, shared_pairs = 0;  // (query, key) pairs, in its share of the heads
  TrafficSum sent_queries, sent_keys;        // rows of q that an exchange sends, and of k (or of v)
  TrafficSum later_keys;                     // of these, in stages behind the first
  double hiding_pairs = 0;                   // of shared_pairs, attended to while these travel
  double num_pieces = 0;
  Traffic route_sent, route_received;  // tokens
  // A sequence lies on consecutive ranks, so a connected group is a run of ranks. True for all of them but the first.
  bool shares_with_previous = false;
};

std::vector<RankLoad> loads_of(const MicroBatchPlan& plan) {
  const Cluster& cluster = plan.input().cluster;
  const AttentionShares shares = plan.input().attention_shares();
  std::vector<RankLoad> loads(static_cast<size_t>(plan.num_ranks()));
  for (int32_t s = 0; s < plan.num_sequences(); ++s) {
    const SequenceId id(s);
    const Placement& place = plan.placement(id);
    const Rank home = plan.seq_lens().home_of(id);
    const double pairs = plan.input().pairs_of(id);
    const AttentionCut cut = plan.input().attention_cut(place.degree);
    const std::vector<QueryPart> parts = place.degree > 1 ? plan.query_parts(id) : std::vector<QueryPart>();
    for (const Chunk& chunk : plan.chunks(id)) {
      RankLoad& load = loads[chunk.rank.index()];
      load.tokens += chunk.num_tokens;
      if (chunk.rank != home) {
        const auto link = cluster.same_node(chunk.rank, home) ? &Traffic::inside : &Traffic::between;
        loads[home.index()].route_sent.*link += static_cast<double>(chunk.num_tokens);
        load.route_received.*link += static_cast<double>(chunk.num_tokens);
      }
      if (place.degree == 1) {
        load.whole_pairs += pairs;
        continue;
      }
      const double part_of_pairs = shares.part(pairs, place.degree, chunk.rank.value - place.first_rank.value);
      load.shared_pairs += part_of_pairs * cut.attention_factor();
      load.hiding_pairs += part_of_pairs * cut.part_of_later_stages();
      load.num_pieces += place.degree;
      if (chunk.rank != place.first_rank) load.shares_with_previous = true;
      for (size_t part = 0; part < parts.size(); ++part) {
        const auto held = [&](int64_t first, int64_t num) {
          const int64_t begin = std::max(first, chunk.first_token);
          return std::max<int64_t>(0, std::min(first + num, chunk.first_token + chunk.num_tokens) - begin);
        };
        const SentColumns sent =
            sent_columns(cluster, shares, chunk.rank, place.first_rank, place.degree, static_cast<int32_t>(part));
        load.sent_queries.add(held(parts[part].first_query, parts[part].num_queries), sent.query);
        const int64_t num_keys = held(parts[part].first_key, parts[part].num_keys);
        load.sent_keys.add(num_keys, sent.key);
        if (cut.num_stages > 1) load.later_keys.add(num_keys, sent.key * cut.part_of_later_stages());
      }
    }
  }
  return loads;
}

/// Adds `times` passes of a group to its block time.
void add_pass(std::span<const RankTime> ranks, PassTime RankTime::*pass, double times, StepTerms& block) {
  const PassTime* longest = &(ranks[0].*pass);
  double token_s = 0;
  const auto phase_s = [](const PassTime& t) { return t.attention_s() + t.exchange_s(); };
  for (const RankTime& rank : ranks) {
    const PassTime& t = rank.*pass;
    token_s = std::max(token_s, t.token_s);
    if (phase_s(t) > phase_s(*longest)) longest = &t;
  }
  block.token_s += times * token_s;
  block.attention_s += times * longest->attention_s();
  block.exchange_s += times * longest->exchange_s();
}

/// Seconds of FSDP's communication. While one block computes, the next block's parameters are gathered and the previous
/// block's gradients are reduced. Gathers run along a ring, all-reduces over the copies along a tree. A frozen base has
/// no gradients to reduce.
struct Fsdp {
  double gather_s = 0, reduce_s = 0;  // of a block
  double bytes = 0;                   // sent by all ranks, for all blocks
  int32_t num_blocks = 1;
  Passes passes;

  Fsdp(int32_t num_ranks, const Cluster& cluster, const TrainedModel& model)
      : num_blocks(model.num_blocks), passes(model.passes()) {
    const int32_t shards = std::min(model.shard_ranks, num_ranks);
    const int32_t copies = (num_ranks + shards - 1) / shards;
    const double block_bytes = model.num_parameters / model.num_blocks * model.element_size;

    const bool reduces = model.mode == StepMode::kTraining;
    const double gather_bytes = block_bytes * (shards - 1) / shards;
    const double all_reduce_bytes = 2 * block_bytes / shards * (copies - 1) / copies;
    const double gathers = passes.backwards > 0 ? 2 : 1;
    bytes = static_cast<double>(num_ranks) * num_blocks *
            (gathers * gather_bytes + (reduces ? gather_bytes + all_reduce_bytes : 0));

    if (shards > 1) {
      const int32_t nodes = (shards + cluster.ranks_per_node - 1) / cluster.ranks_per_node;
      const double inside_s = gather_bytes / cluster.node_bytes_per_s;
      // The adapters of a node together fetch the shards that its ranks lack.
      const int32_t adapters = std::min(shards, cluster.ranks_per_node);
      const double between_s = block_bytes * (nodes - 1) / nodes / (adapters * cluster.network_bytes_per_s);
      gather_s = std::max(inside_s, between_s) + (nodes - 1) * cluster.network_latency_s + cluster.node_latency_s;
    }
    double all_reduce_s = 0;
    if (copies > 1) {
      const double bandwidth =
          num_ranks <= cluster.ranks_per_node ? cluster.node_bytes_per_s : cluster.network_bytes_per_s;
      all_reduce_s = all_reduce_bytes / bandwidth + 2 * std::ceil(std::log2(copies)) * cluster.network_latency_s;
    }
    reduce_s = reduces ? gather_s + all_reduce_s : 0;
  }

  /// The communication time of all blocks that blocks of `block_s` do not hide. Nothing hides the first gather and the
  /// last reduction.
  double exposed_s(double block_s) const {
    const double forward_s = block_s / passes.token(), backward_s = block_s - forward_s;
    const double exposed_backward_s = passes.backwards > 0 ? std::max(0.0, gather_s + reduce_s - backward_s) : 0;
    return gather_s + reduce_s + (num_blocks - 1) * (std::max(0.0, gather_s - forward_s) + exposed_backward_s);
  }
  /// The time of the blocks and of the communication that they do not hide.
  double step_s(double block_s) const { return num_blocks * block_s + exposed_s(block_s); }
};

double route_s_of(std::span<const RankLoad> ranks, double token_bytes, const Cluster& cluster, double num_routes) {
  double slowest_s = 0;
  for (const RankLoad& rank : ranks) {
    for (const Traffic& tokens : {rank.route_sent, rank.route_received})
      slowest_s = std::max(slowest_s, (tokens * token_bytes).seconds(cluster));
  }
  return num_routes * slowest_s;
}

/// What an exchange of a rank sends before attention and after it, and of the former in later stages.
struct SentBytes {
  Traffic after, before, later;

  SentBytes(const RankLoad& load, double row_bytes)
      : after(load.sent_queries.sum() * row_bytes),
        before(after + load.sent_keys.sum() * (2 * row_bytes)),
        later(load.later_keys.sum() * (2 * row_bytes)) {}
};

/// Seconds of a forward pass by the cost model.
RankCompute compute_of(const PlanInput& input, const RankLoad& load, Rank rank) {
  const double rate = input.cluster.flops_per_s * input.speed_of(rank);
  const auto attention_s = [&](double pairs) {
    return input.workload.attention_work_of_pairs(pairs, input.d_model) / rate;
  };
  return {.token_s = static_cast<double>(load.tokens) * input.token_work(1) / rate,
          .whole_attention_s = attention_s(load.whole_pairs),
          .shared_attention_s = attention_s(load.shared_pairs)};
}

/// compute: of this pass.
PassTime pass_time(const Cluster& cluster, const RankLoad& load, const SentBytes& sent, const RankCompute& compute) {
  PassTime t{.token_s = compute.token_s,
             .pre_attn_s = (sent.before - sent.later).seconds(cluster),
             .whole_attention_s = compute.whole_attention_s,
             .shared_attention_s = compute.shared_attention_s,
             .post_attn_s = sent.after.seconds(cluster)};
  if (cluster.overlaps_attention) t.hidden_s = std::min(t.pre_attn_s, t.whole_attention_s);
  if (sent.later.total() > 0) {
    const double later_s = sent.later.seconds(cluster);
    t.pre_attn_s += later_s;
    t.hidden_s += std::min(later_s, t.shared_attention_s * load.hiding_pairs / load.shared_pairs);
  }
  return t;
}

/// A block, all passes, of the slowest connected group of a replica. Sets the ranks' block_s.
StepTerms slowest_block(std::span<RankTime> ranks, std::span<const RankLoad> loads, const PlanInput& input) {
  const Passes passes = input.model.passes();
  StepTerms slowest;
  for (size_t first = 0, last; first < ranks.size(); first = last) {
    for (last = first + 1; last < ranks.size() && ranks[last].group == ranks[first].group;) ++last;
    const std::span<RankTime> group = ranks.subspan(first, last - first);
    StepTerms block;
    add_pass(group, &RankTime::forward, passes.forwards, block);
    add_pass(group, &RankTime::backward, passes.backwards, block);
    for (const RankLoad& load : loads.subspan(first, last - first))
      block.host_s = std::max(block.host_s, input.cluster.host_s_per_piece * load.num_pieces);
    for (RankTime& rank : group) rank.block_s = block.blocks_s();
    if (block.blocks_s() > slowest.blocks_s()) slowest = block;
  }
  return slowest;
}

/// A block's work, all passes, divided evenly over the ranks.
double ideal_block_s(const MicroBatchPlan& plan) {
  const PlanInput& input = plan.input();
  const Passes passes = input.model.passes();
  double pairs = 0;
  for (int32_t s = 0; s < plan.num_sequences(); ++s) pairs += input.pairs_of(SequenceId(s));
  const double work = passes.token() * (static_cast<double>(plan.num_tokens()) * input.token_work(1)) +
                      passes.attention() * input.workload.attention_work_of_pairs(pairs, input.d_model);
  return work / input.group_speed(Rank(0), plan.num_ranks()).sum / input.cluster.flops_per_s;
}

void check(std::span<const RankCompute> measured, int32_t num_ranks) {
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

BlockRates::BlockRates(const PlanInput& input) {
  const Passes passes = input.model.passes();
  token_s = passes.token() * input.token_work(1) / input.cluster.flops_per_s;
  pair_s = passes.attention() * input.workload.attention_work_of_pairs(1, input.d_model) / input.cluster.flops_per_s;
}

double MicroBatchTime::total_s() const {
  double sum = 0;
  for_each_field<StepTerms>([&](const auto& f) { sum += this->*f.member; });
  return sum;
}

MicroBatchTime predict_micro_batch(const MicroBatchPlan& plan, std::span<const RankCompute> measured) {
  check(measured, plan.num_ranks());
  const PlanInput& input = plan.input();
  const TrainedModel& model = input.model;
  const Passes passes = model.passes();
  const std::vector<RankLoad> loads = loads_of(plan);
  const double bytes = row_bytes(input), token_bytes = bytes + model.side_bytes_per_token;

  MicroBatchTime out;
  out.fixed_s = input.cluster.fixed_s;
  double computed_s = 0;  // by all ranks
  for (int32_t r = 0; r < plan.num_ranks(); ++r) {
    const RankLoad& load = loads[r];
    const SentBytes sent(load, bytes);
    const RankCompute compute = measured.empty() ? compute_of(input, load, Rank(r)) : measured[r];
    computed_s += passes.token() * compute.token_s +
                  passes.attention() * (compute.whole_attention_s + compute.shared_attention_s);
    const Rank group = load.shares_with_previous ? out.ranks[r - 1].group : Rank(r);
    out.ranks.push_back({.group = group, .forward = pass_time(input.cluster, load, sent, compute), .backward = {}});
    if (passes.backwards > 0) {
      const RankCompute backward = {.token_s = passes.token_backward * compute.token_s,
                                    .whole_attention_s = passes.attention_backward * compute.whole_attention_s,
                                    .shared_attention_s = passes.attention_backward * compute.shared_attention_s};
      out.ranks[r].backward = pass_time(input.cluster, load, sent, backward);
    }
    out.attention_bytes = out.attention_bytes + (sent.before + sent.after) * (passes.exchanges() * model.num_blocks);
    out.route_bytes = out.route_bytes + load.route_sent * (token_bytes * passes.routes);
  }

  const int32_t num_ranks = plan.topology().num_ranks_per_replica();
  const Fsdp fsdp(plan.num_ranks(), input.cluster, model);
  double slowest_s = -1;
  for (int32_t begin = 0; begin < plan.num_ranks(); begin += num_ranks) {  // a replica's first rank
    const StepTerms block = slowest_block(std::span(out.ranks).subspan(begin, num_ranks),
                                          std::span(loads).subspan(begin, num_ranks), input);
    const double route_s =
        route_s_of(std::span(loads).subspan(begin, num_ranks), token_bytes, input.cluster, passes.routes);
    const double block_s = block.blocks_s(), step_s = fsdp.step_s(block_s) + route_s;
    out.replica_block_s.push_back(block_s);
    if (step_s <= slowest_s) continue;
    slowest_s = step_s;
    for (const auto term : {&StepTerms::token_s, &StepTerms::attention_s, &StepTerms::exchange_s, &StepTerms::host_s})
      out.*term = block.*term * model.num_blocks;
    out.route_s = route_s;
    out.fsdp_s = fsdp.exposed_s(block_s);
  }
  out.fsdp_bytes = fsdp.bytes;
  out.ideal_s = model.num_blocks * (measured.empty() ? ideal_block_s(plan) : computed_s / plan.num_ranks());
  return out;
}

StepTime predict_step(const Plan& plan) {
  StepTime out;
  const bool waits_once = plan.input().sync == StepSync::kStep;
  const int32_t num_blocks = plan.input().sequences.model.num_blocks;
  std::vector<double> rank_s(static_cast<size_t>(plan.num_ranks()));  // when each rank is done
  double fsdp_s = 0;                                                  // after the last micro-batch
  for (const MicroBatchPlan& micro_batch : plan.plans()) {
    const MicroBatchTime time = predict_micro_batch(micro_batch);
    out.ideal_step_s += time.ideal_step_s();
    out.micro_batch_s.push_back(time.total_s());
    if (!waits_once) {
      out.total_s += time.total_s();
      continue;
    }
    std::vector<double> start_s(rank_s.size());  // of a group, at its first rank
    for (size_t r = 0; r < rank_s.size(); ++r) {
      double& latest_s = start_s[time.ranks[r].group.index()];
      latest_s = std::max(latest_s, rank_s[r]);
    }
    for (size_t r = 0; r < rank_s.size(); ++r)
      rank_s[r] = start_s[time.ranks[r].group.index()] + num_blocks * time.ranks[r].block_s;
    out.total_s += time.route_s + time.fixed_s;
    fsdp_s = time.fsdp_s;
  }
  if (waits_once) out.total_s += fsdp_s + std::ranges::max(rank_s);
  return out;
}

double blocks_and_fsdp_s(const StepInput& input, std::span<const double> block_s) {
  if (input.sync == StepSync::kStep)
    return replica_step_s(input.sequences, std::accumulate(block_s.begin(), block_s.end(), 0.0));
  double sum_s = 0;
  for (const double seconds : block_s) sum_s += replica_step_s(input.sequences, seconds);
  return sum_s;
}

double replica_step_s(const PlanInput& input, double block_s) {
  return Fsdp(input.topology.num_ranks(), input.cluster, input.model).step_s(block_s);
}

}  // namespace knapformer
