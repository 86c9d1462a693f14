#include "knapformer/core/cluster.h"

#include <algorithm>
#include <limits>

#include "knapformer/core/error.h"
#include "knapformer/core/plan.h"

namespace knapformer {

void ClusterModel::validate() const {
  constexpr double kLeast = 1 / kMaxMagnitude, kInfinity = std::numeric_limits<double>::infinity();
  check_range("flops_per_s", flops_per_s, kLeast);
  check_range("node_bytes_per_s", node_bytes_per_s, kLeast, kInfinity);
  check_range("network_bytes_per_s", network_bytes_per_s, kLeast, kInfinity);
  check_range("bytes_per_number", bytes_per_number, kLeast);
  if (ranks_per_node < 1) throw_argument("ranks_per_node", ranks_per_node, "at least 1");
}

double ClusterModel::exchange_s_per_token(Rank first_rank, int32_t degree, int64_t d_model) const {
  if (degree == 1) return 0;
  const double bandwidth =
      same_node(first_rank, Rank(first_rank.value + degree - 1)) ? node_bytes_per_s : network_bytes_per_s;
  return 4.0 * static_cast<double>(d_model) * bytes_per_number * (degree - 1) / degree / bandwidth;
}

namespace {

/// Seconds of the chunks of one rank. Tokens that exchange alike are counted before they are multiplied: so where all
/// do, as in a flat bag, the sum does not depend on the order of sequences.
class ExchangeSum {
 public:
  void add(int64_t tokens, double s_per_token) {
    if (s_per_token != s_per_token_) {
      earlier_s_ = seconds();
      tokens_ = 0;
      s_per_token_ = s_per_token;
    }
    tokens_ += tokens;
  }
  double seconds() const { return earlier_s_ + s_per_token_ * static_cast<double>(tokens_); }

 private:
  double earlier_s_ = 0;
  double s_per_token_ = 0;
  int64_t tokens_ = 0;
};

}  // namespace

BlockTime predict_block_time(const Plan& plan) {
  const PlanInput& input = plan.input();
  const ClusterModel& cluster = input.cluster;
  const auto num_ranks = static_cast<size_t>(plan.num_ranks());
  BlockTime time;
  time.ranks.resize(num_ranks);
  time.group_s.resize(num_ranks);
  double total_work = 0;
  // Groups of sequences are aligned and nest, but a plan read from a file is only trusted as far as it is checked: so
  // groups are joined by union-find, the lowest rank leading.
  std::vector<int32_t> leader(num_ranks);
  for (size_t r = 0; r < num_ranks; ++r) leader[r] = static_cast<int32_t>(r);
  const auto find = [&](int32_t rank) {
    while (leader[static_cast<size_t>(rank)] != rank) {
      int32_t& above = leader[static_cast<size_t>(rank)];
      above = leader[static_cast<size_t>(above)];
      rank = above;
    }
    return rank;
  };
  std::vector<double> pairs_of_rank(num_ranks, 0);
  std::vector<ExchangeSum> exchanges(num_ranks);
  for (int32_t s = 0; s < plan.num_sequences(); ++s) {
    const SequenceId id(s);
    const Placement& place = plan.placement(id);
    const double pairs = input.pairs_of(id) / place.degree;
    const double exchange = cluster.exchange_s_per_token(place.first_rank, place.degree, input.d_model);
    total_work += input.work(id);
    for (const Chunk& chunk : plan.chunks(id)) {
      pairs_of_rank[chunk.rank.index()] += pairs;
      exchanges[chunk.rank.index()].add(chunk.num_tokens, exchange);
      const int32_t a = find(chunk.rank.value), b = find(place.first_rank.value);
      leader[static_cast<size_t>(std::max(a, b))] = std::min(a, b);
    }
  }
  std::vector<double> token_s(num_ranks, 0), attention_s(num_ranks, 0);
  for (size_t r = 0; r < num_ranks; ++r) {
    const double rate = cluster.flops_per_s * input.speed_of(Rank(r));
    time.ranks[r] = {
        .token_s = input.workload.token_work(plan.tokens_after()[r], input.d_model) / rate,
        .attention_s = input.workload.attention_work_of_pairs(pairs_of_rank[r], input.d_model) / rate,
        .exchange_s = exchanges[r].seconds(),
    };
    const auto group = static_cast<size_t>(find(static_cast<int32_t>(r)));
    time.group_of_rank.push_back(Rank(group));
    token_s[group] = std::max(token_s[group], time.ranks[r].token_s);
    attention_s[group] = std::max(attention_s[group], time.ranks[r].attention_s + time.ranks[r].exchange_s);
  }
  for (size_t r = 0; r < num_ranks; ++r) {
    const size_t group = time.group_of_rank[r].index();
    time.group_s[r] = token_s[group] + attention_s[group];
    time.slowest_s = std::max(time.slowest_s, time.group_s[r]);
  }
  time.ideal_s = total_work / input.total_speed() / cluster.flops_per_s;
  return time;
}

}  // namespace knapformer
