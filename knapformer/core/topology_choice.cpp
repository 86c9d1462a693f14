#include "knapformer/core/topology_choice.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "knapformer/core/error.h"
#include "knapformer/core/planner.h"

namespace knapformer {
namespace {

void check_not_negative(int32_t num_heads) {
  if (num_heads < 0) throw_argument("num_heads", num_heads, "at least 1, or 0 for any");
}

struct Candidate {
  std::string text;
  int32_t bag_ranks = 1;
  bool nested = false;
};

std::vector<Candidate> candidates(int32_t num_ranks, int32_t node, const TopologyQuestion& question) {
  std::vector<Candidate> out;
  for (int32_t size = 1; size <= std::min(2 * static_cast<int64_t>(node), int64_t{num_ranks}); ++size) {
    const bool tiles_nodes = node % size == 0 || size % node == 0;
    if (num_ranks % size != 0 || !tiles_nodes || question.num_heads % size != 0) continue;
    out.push_back({.text = text('g', size, 'n', num_ranks / size), .bag_ranks = size});
    if (size == 1 || question.solver == "greedy") continue;
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

void check_heads(const Topology& topology, int32_t num_heads) {
  check_not_negative(num_heads);
  for (const BagShape& shape : topology.shapes()) {
    const int32_t ranks = shape.num_ranks_per_bag();
    if (num_heads % ranks != 0) {
      throw_argument("num_heads", text(num_heads, " for topology ", topology.str()),
                     text("a multiple of the ", ranks, " ranks of a bag, or none: uneven shares of the heads, which ",
                          "the balancer takes, the prediction does not see"));
    }
  }
}

std::vector<TopologyOption> rank_topologies(std::span<const PlanInput> batches, const TopologyQuestion& question) {
  if (batches.empty()) throw_argument("batches", "none", "at least one batch of lengths");
  const int32_t num_ranks = batches.front().seq_lens.num_ranks();
  if (num_ranks < 1) throw_argument("batches", "no ranks", "lengths for at least one rank");
  check_not_negative(question.num_heads);
  const ClusterModel& cluster = batches.front().cluster;
  cluster.validate();
  for (const PlanInput& batch : batches) {
    if (batch.seq_lens.num_ranks() != num_ranks) {
      throw_argument("batches", text("lengths for ", batch.seq_lens.num_ranks(), " ranks beside ", num_ranks),
                     "batches for one number of ranks");
    }
    if (batch.cluster != cluster) throw_argument("batches", "several cluster models", "one for all");
  }

  std::vector<std::pair<TopologyOption, Candidate>> ranked;
  for (const Candidate& candidate : candidates(num_ranks, cluster.ranks_per_node, question)) {
    TopologyOption option{.topology = candidate.text};
    double exchange = 0, ideal_s = 0, longest_s = 0;
    const double weight = 1.0 / static_cast<double>(batches.size());
    for (const PlanInput& batch : batches) {
      PlanInput input = batch;
      input.topology = Topology::parse(candidate.text, num_ranks);
      input.validate();
      try {
        const Plan plan = make_plan(std::move(input), question.solver);
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
          longest_s = std::max(longest_s, plan.input().work(SequenceId(s)) / cluster.flops_per_s);
        }
      } catch (const ArgumentError& error) {
        const std::string_view refusal = error.what();
        if (!refusal.starts_with("max_tokens_per_rank:")) throw;
        constexpr double kNever = std::numeric_limits<double>::infinity();
        option = {.topology = candidate.text,
                  .predicted_time_s = kNever,
                  .efficiency_loss = kNever,
                  .reason = std::string(refusal)};
        break;
      }
    }
    if (option.reason.empty()) option.reason = reason_for(candidate, option, exchange, ideal_s, longest_s);
    ranked.emplace_back(std::move(option), candidate);
  }
  std::stable_sort(ranked.begin(), ranked.end(), [](const auto& a, const auto& b) {
    // Of those that cannot keep a limit of tokens first the one that comes closest: large bags share the most.
    const int32_t sign = std::isinf(a.first.predicted_time_s) ? -1 : 1;
    return std::tuple(a.first.predicted_time_s, a.first.crossing, sign * a.second.bag_ranks, sign * a.second.nested) <
           std::tuple(b.first.predicted_time_s, b.first.crossing, sign * b.second.bag_ranks, sign * b.second.nested);
  });
  std::vector<TopologyOption> out;
  for (auto& [option, candidate] : ranked) out.push_back(std::move(option));
  return out;
}

}  // namespace knapformer
