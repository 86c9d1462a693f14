#include "knapformer/core/planners/attention_cuts_and_stages.h"

#include <algorithm>

#include "knapformer/core/cost/step_time.h"
#include "knapformer/core/util/error.h"

namespace knapformer {
namespace {

/// More parts or stages must gain this: they take more, smaller launches, which no term counts. Half or double changes
/// no step of the mixes with 12 heads on 8 ranks.
constexpr double kWorthMore = 0.99;

/// What the ranks of a group share: seconds of attention, and tokens that are exchanged.
struct SharedLoad {
  double attention_s = 0, tokens = 0, longest = 0;
  int32_t count = 0;

  void add(const PlanInput& input, const BlockRates& rates, SequenceId id) {
    attention_s += input.pairs_of(id) * rates.pair_s;
    tokens += static_cast<double>(input.seq_lens[id]);
    longest = std::max(longest, static_cast<double>(input.seq_lens[id]));
    ++count;
  }
};

/// Of the sequences with more work than `least_s` and at most `most_s`.
SharedLoad load_of(const PlanInput& input, const BlockRates& rates, double least_s, double most_s) {
  SharedLoad load;
  for (SequenceId id(0); id.value < input.seq_lens.num_sequences(); ++id.value) {
    const double work_s = rates.work_s(input, id);
    if (work_s > least_s && work_s <= most_s) load.add(input, rates, id);
  }
  return load;
}

/// Bytes of keys and values of so many tokens that come to the rank with the most heads.
double key_bytes(const PlanInput& input, const AttentionShares& shares, int32_t degree, double tokens) {
  int32_t most = 0;
  for (int32_t i = 0; i < shares.head_parts(degree); ++i) most = std::max(most, shares.key_heads(degree, i));
  const double head_dim = static_cast<double>(input.d_model) / shares.num_heads(degree);
  return 2 * tokens * most * head_dim * input.model.element_size;
}

/// Whether every rank has work, and at most a third more than another.
bool is_fair(const AttentionShares& shares, int32_t degree) {
  int32_t least = shares.num_heads(degree), most = 0;
  for (int32_t i = 0; i < shares.head_parts(degree); ++i) {
    least = std::min(least, shares.query_heads(degree, i));
    most = std::max(most, shares.query_heads(degree, i));
  }
  return least > 0 && 3 * most <= 4 * least;
}

/// load: of one group of this degree, of whose tokens so many meet in a micro-batch. whole_s: attention of each rank on
/// whole sequences; meanwhile the first keys travel.
AttentionCut best_cut(const PlanInput& input, Rank first_rank, int32_t degree, const SharedLoad& load,
                      double micro_batch_tokens, double whole_s) {
  AttentionCut best{.degree = degree, .num_parts = degree};
  double best_s = kInfinity;
  double least_excess = kInfinity;  // of max_stage_bytes
  const bool overlaps = input.cluster.overlaps_attention;
  for (int32_t num_parts = 1; num_parts <= degree; ++num_parts) {
    if (degree % num_parts != 0) continue;
    AttentionCut cut{.degree = degree, .num_parts = num_parts};
    const AttentionShares shares(input.model.num_heads, input.model.num_kv_heads, {&cut, 1});
    if (!is_fair(shares, degree)) continue;
    const double max_bytes = input.model.max_stage_bytes;
    const double limits = max_bytes > 0 ? key_bytes(input, shares, degree, micro_batch_tokens) / max_bytes : 0;
    if (num_parts == 1 && shares.is_even(degree) && limits <= 1) return cut;  // moves the fewest bytes
    const SentRows sent = sent_range(input.cluster, shares, first_rank, degree).max;
    const auto seconds = [&](const Traffic& columns) {
      return load.tokens / degree * exchange_s(input, columns).slower();
    };
    const double attention_s = load.attention_s * shares.max(degree);
    const double keys_s = seconds(sent.keys());
    const int32_t max_stages = overlaps ? input.max_stages(num_parts) : 1;
    for (cut.num_stages = 1; cut.num_stages <= max_stages; cut.num_stages *= 2) {
      const double later_s = keys_s * cut.part_of_later_stages(), first_s = seconds(sent.before) - later_s;
      const double time_s = attention_s * cut.attention_factor() + seconds(sent.after) +
                            std::max(0.0, first_s - (overlaps ? whole_s : 0)) +
                            std::max(0.0, later_s - attention_s * cut.part_of_later_stages());
      const double excess = std::max(1.0, limits / cut.num_stages);
      if (excess > least_excess || (excess == least_excess && time_s >= best_s * kWorthMore)) continue;
      least_excess = excess;
      best_s = time_s;
      best = cut;
    }
  }
  return best;
}

}  // namespace

void cut_attention(PlanInput& input, int32_t num_micro_batches) {
  input.attention_cuts.clear();
  if (!input.model.cuts_queries || input.model.num_heads == 0 || input.seq_lens.num_sequences() == 0) return;
  const BlockRates rates(input);
  double total_s = 0;
  SequenceId longest(0);
  for (SequenceId id(0); id.value < input.seq_lens.num_sequences(); ++id.value) {
    total_s += rates.work_s(input, id);
    if (rates.work_s(input, id) > rates.work_s(input, longest)) longest = id;
  }
  const int32_t num_ranks = input.topology.num_ranks();
  const double even_s = total_s / input.group_speed(Rank(0), num_ranks).sum;
  const SharedLoad whole = load_of(input, rates, 0, even_s);
  const double whole_s = whole.count < num_ranks ? 0 : whole.attention_s / num_ranks;  // else some ranks have none
  for (const Bag& bag : input.topology.bags()) {
    const std::vector<int32_t>& degrees = input.topology.shapes()[bag.shape].degrees;
    for (size_t k = 0; k < degrees.size(); ++k) {
      const int32_t degree = degrees[k];
      if (degree == 1 ||
          std::ranges::find(input.attention_cuts, degree, &AttentionCut::degree) != input.attention_cuts.end())
        continue;
      const double least_s = k == 0 ? 0 : degrees[k - 1] * even_s;
      const double most_s = k + 1 == degrees.size() ? kInfinity : degree * even_s;
      SharedLoad load = load_of(input, rates, least_s, most_s);
      if (load.count == 0) load.add(input, rates, longest);
      const int32_t num_groups = std::min(load.count, num_ranks / degree);
      load.attention_s /= num_groups;
      load.tokens /= num_groups;
      const double micro_batch_tokens = std::max(load.longest, load.tokens / num_micro_batches);
      input.attention_cuts.push_back(
          best_cut(input, bag.first_rank, degree, load, micro_batch_tokens, degrees.front() > 1 ? 0 : whole_s));
    }
  }
}

}  // namespace knapformer
