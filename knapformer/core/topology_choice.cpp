#include "knapformer/core/topology_choice.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "knapformer/core/error.h"
#include "knapformer/core/planner.h"

namespace knapformer {
namespace {

struct Candidate {
  std::string text;
  int32_t bag_ranks = 1;
  bool nested = false;
};

std::vector<Candidate> candidates(int32_t num_ranks, const TopologyQuestion& question) {
  std::vector<Candidate> out;
  const int32_t largest = std::min(2 * question.cluster.ranks_per_node, question.num_heads);
  for (int32_t size = 1; size <= std::min(largest, num_ranks); ++size) {
    const int32_t node = question.cluster.ranks_per_node;
    const bool tiles_nodes = node % size == 0 || size % node == 0;
    if (num_ranks % size != 0 || !tiles_nodes) continue;
    out.push_back({.text = text('g', size, 'n', num_ranks / size), .bag_ranks = size});
    if (size == 1) continue;
    // All the way down to 1, by the smallest prime each time: the most degrees that divide each other.
    std::string nested = text('g', size);
    for (int32_t degree = size; degree > 1;) {
      int32_t prime = 2;
      while (degree % prime != 0) ++prime;
      degree /= prime;
      nested += text('/', degree);
    }
    out.push_back({.text = nested + text('n', num_ranks / size), .bag_ranks = size, .nested = true});
  }
  return out;
}

std::string percent(double share) { return text(std::round(share * 1000) / 10, " %"); }

std::string reason_for(const Candidate& candidate, const TopologyOption& option, double exchange, double ideal_s,
                       double longest_s) {
  if (std::isinf(option.predicted_time_s)) return "cannot keep the limit of tokens per rank";
  const double share = longest_s / candidate.bag_ranks / ideal_s;
  if (share > 1.02) {
    return text("the longest sequence alone is ", std::round(longest_s / ideal_s * 10) / 10,
                " times a rank's share of the work, and at most ", candidate.bag_ranks,
                candidate.bag_ranks == 1 ? " rank" : " ranks", " can hold it");
  }
  const double idle = std::max(0.0, option.efficiency_loss - 1 - exchange);
  return text(percent(exchange), " of the ideal time goes to exchanges",
              option.crossing == 0 ? " (nothing is shared)" : "", ", ", percent(idle), " to waiting");
}

}  // namespace

std::vector<TopologyOption> rank_topologies(std::span<const SequenceLengths> batches,
                                            const TopologyQuestion& question) {
  if (batches.empty()) throw_argument("batches", "none", "at least one batch of lengths");
  const int32_t num_ranks = batches.front().num_ranks();
  if (num_ranks < 1) throw_argument("batches", "no ranks", "lengths for at least one rank");
  if (question.num_heads < 1) throw_argument("num_heads", question.num_heads, "at least 1");
  for (const SequenceLengths& batch : batches) {
    if (batch.num_ranks() != num_ranks) {
      throw_argument("batches", text("lengths for ", batch.num_ranks(), " ranks beside ", num_ranks),
                     "batches for one number of ranks");
    }
  }
  question.cluster.validate();

  std::vector<std::pair<TopologyOption, Candidate>> ranked;
  for (const Candidate& candidate : candidates(num_ranks, question)) {
    TopologyOption option{.topology = candidate.text};
    double exchange = 0, ideal_s = 0, longest_s = 0;
    const double weight = 1.0 / static_cast<double>(batches.size());
    for (const SequenceLengths& batch : batches) {
      PlanInput input;
      input.seq_lens = batch;
      input.topology = Topology::parse(candidate.text, num_ranks);
      input.d_model = question.d_model;
      input.workload = question.workload;
      input.cluster = question.cluster;
      input.max_tokens_per_rank = question.max_tokens_per_rank;
      try {
        const Plan plan = plan_balanced(std::move(input));
        const BlockTime time = predict_block_time(plan);
        option.predicted_time_s += weight * time.slowest_s;
        option.efficiency_loss += weight * time.efficiency_loss();
        if (plan.num_tokens() > 0) {
          option.crossing += weight * plan.attention_tokens_moved() / static_cast<double>(plan.num_tokens());
          option.max_tokens_over_mean +=
              weight * static_cast<double>(plan.max_tokens()) * num_ranks / static_cast<double>(plan.num_tokens());
        }
        double exchanged_s = 0;
        for (const RankPhases& rank : time.ranks) exchanged_s += rank.exchange_s;
        exchange += time.ideal_s > 0 ? weight * exchanged_s / num_ranks / time.ideal_s : 0;
        ideal_s = std::max(ideal_s, time.ideal_s);
        for (int32_t s = 0; s < plan.num_sequences(); ++s) {
          longest_s = std::max(longest_s, plan.input().work(SequenceId(s)) / question.cluster.flops_per_s);
        }
      } catch (const ArgumentError&) {
        if (question.max_tokens_per_rank == 0) throw;
        option.predicted_time_s = option.efficiency_loss = std::numeric_limits<double>::infinity();
      }
    }
    option.reason = reason_for(candidate, option, exchange, ideal_s, longest_s);
    ranked.emplace_back(std::move(option), candidate);
  }
  std::stable_sort(ranked.begin(), ranked.end(), [](const auto& a, const auto& b) {
    return std::tuple(a.first.predicted_time_s, a.first.crossing, a.second.bag_ranks, a.second.nested) <
           std::tuple(b.first.predicted_time_s, b.first.crossing, b.second.bag_ranks, b.second.nested);
  });
  std::vector<TopologyOption> out;
  for (auto& [option, candidate] : ranked) out.push_back(std::move(option));
  return out;
}

}  // namespace knapformer
