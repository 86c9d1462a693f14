#include "knapformer/core/plan/plan_input.h"

#include <algorithm>
#include <array>
#include <bit>
#include <numeric>
#include <utility>

#include "knapformer/core/util/error.h"

namespace knapformer {
namespace {

using KeyedId = std::pair<uint64_t, SequenceId>;

/// A stable radix sort. With std::sort, 16,000 sequences are planned in 4.8 ms at low effort, not in 2.7.
void sort_by_key(std::vector<KeyedId>& items) {
  uint64_t varying = 0;  // bits
  for (const auto& [key, id] : items) varying |= key ^ items[0].first;
  std::vector<KeyedId> sorted(items.size());
  for (int shift = 0; shift < 64; shift += 8) {
    if ((varying >> shift & 255) == 0) continue;
    std::array<uint32_t, 257> begins{};  // of the items with each digit
    for (const auto& [key, id] : items) ++begins[(key >> shift & 255) + 1];
    std::partial_sum(begins.begin(), begins.end(), begins.begin());
    for (const KeyedId& item : items) sorted[begins[item.first >> shift & 255]++] = item;
    items.swap(sorted);
  }
}

}  // namespace

void PlanInput::validate() const {
  if (topology.num_ranks() < 1) throw_argument("topology", "none", "one of at least one rank");
  if (seq_lens.num_ranks() != topology.num_ranks()) {
    throw_argument("seq_lens", text("lengths for ", seq_lens.num_ranks(), " ranks"),
                   text("one list for each of the ", topology.num_ranks(), " ranks of topology ", topology.str()));
  }
  constexpr int64_t kMaxWidth = 1 << 24;
  if (d_model < 1 || d_model > kMaxWidth) throw_argument("d_model", d_model, text("a width of 1 to ", kMaxWidth));
  workload.validate();
  cluster.validate();
  model.validate();
  const int32_t num_sequences = seq_lens.num_sequences();
  if (masks.size() != attention_pairs.size() || (!masks.empty() && std::ssize(masks) != num_sequences)) {
    throw_argument("masks", text(masks.size(), " masks and ", attention_pairs.size(), " counts of their pairs"),
                   text("none, or as give_masks sets them for each of the ", num_sequences, " sequences"));
  }
  if (!rank_speed.empty() && rank_speed.size() != static_cast<size_t>(seq_lens.num_ranks())) {
    throw_argument("rank_speed", text(rank_speed.size(), " speeds"),
                   text("none, or one for each of the ", seq_lens.num_ranks(), " ranks"));
  }
  constexpr double kMaxSpeed = 1e18;
  double slowest = kMaxSpeed, fastest = 0;
  for (size_t r = 0; r < rank_speed.size(); ++r) {
    if (!(rank_speed[r] >= 1 / kMaxSpeed && rank_speed[r] <= kMaxSpeed)) {
      throw_argument("rank_speed", text(rank_speed[r], " for rank ", r),
                     text("a positive finite number, from ", 1 / kMaxSpeed, " to ", kMaxSpeed));
    }
    slowest = std::min(slowest, rank_speed[r]);
    fastest = std::max(fastest, rank_speed[r]);
  }
  if (fastest > slowest * kMaxSpeedRatio) {
    throw_argument("rank_speed", text("speeds from ", slowest, " to ", fastest),
                   text("the fastest at most ", kMaxSpeedRatio, " times the slowest"));
  }
  // token_part is lower than this input allows if another micro-batch of the step allows no more.
  check_range("token_part", token_part, 0, given_work.empty() ? 1 : max_token_part(given_work));
  for (const AttentionCut& cut : attention_cuts) {
    if (cut.degree < 1 || cut.num_parts < 1 || cut.degree % cut.num_parts != 0) {
      throw_argument("attention_cuts", text(cut.num_parts, " parts for ", cut.degree, " ranks"),
                     "a divisor of the ranks");
    }
    if (cut.num_stages < 1 || cut.num_stages > max_stages(cut.num_parts)) {
      throw_argument("attention_cuts", text(cut.num_stages, " stages of ", cut.num_parts, " parts"),
                     text("1, or up to ", AttentionCut::kMaxStages, " where queries are cut of full attention"));
    }
  }
  if (max_tokens_per_rank < 0)
    throw_argument("max_tokens_per_rank", max_tokens_per_rank, "at least 1, or 0 for no limit");
}

void PlanInput::give_masks(std::vector<Mask> of_sequences) {
  const bool all_full =
      std::ranges::all_of(of_sequences, [](const Mask& mask) { return mask.kind == Mask::Kind::kFull; });
  attention_pairs.clear();
  masks = all_full ? std::vector<Mask>() : std::move(of_sequences);
  for (size_t s = 0; s < masks.size(); ++s) attention_pairs.push_back(masks[s].pairs(seq_lens.lens()[s]));
}

void PlanInput::give_mask(const Mask& of_all) {
  give_masks(of_all.kind == Mask::Kind::kFull ? std::vector<Mask>() : std::vector(seq_lens.lens().size(), of_all));
}

PlanInput PlanInput::without_sequences() const {
  PlanInput settings = *this;
  settings.seq_lens = {};
  settings.attention_pairs.clear();
  settings.masks.clear();
  settings.given_work.clear();
  return settings;
}

void PlanInput::append_given(const PlanInput& from, SequenceId id) {
  const auto append = [&](auto PlanInput::*list) {
    if (!(from.*list).empty()) (this->*list).push_back((from.*list)[id.index()]);
  };
  append(&PlanInput::attention_pairs);
  append(&PlanInput::masks);
  append(&PlanInput::given_work);
}

std::optional<Mask> PlanInput::common_mask() const {
  if (masks.empty()) return Mask();
  const bool is_common = std::ranges::all_of(masks, [&](const Mask& mask) { return mask == masks[0]; });
  return is_common ? std::optional(masks[0]) : std::nullopt;
}

PlanInput::GroupSpeed PlanInput::group_speed(Rank first, int32_t num_ranks) const {
  GroupSpeed speed{.sum = 0, .slowest = speed_of(first)};
  for (int32_t r = first.value; r < first.value + num_ranks; ++r) {
    speed.sum += speed_of(Rank(r));
    speed.slowest = std::min(speed.slowest, speed_of(Rank(r)));
  }
  return speed;
}

std::pair<SequenceId, SequenceId> PlanInput::sequences_of(int32_t replica) const {
  const int32_t num_ranks = topology.num_ranks_per_replica();
  return {seq_lens.first_of(Rank(replica * num_ranks)), seq_lens.last_of(Rank((replica + 1) * num_ranks - 1))};
}

std::vector<SequenceId> PlanInput::by_descending_work(int32_t replica) const {
  const auto [first, last] = sequences_of(replica);
  // With full attention a longer sequence has more work, and lengths have fewer digits to sort by. The bits of a double
  // >= 0 sort as its value does. Keys are inverted, so that the most work comes first.
  const bool is_full = attention_pairs.empty() && given_work.empty();
  std::vector<KeyedId> order;
  for (SequenceId id = first; id.value < last.value; ++id.value)
    order.emplace_back(~(is_full ? static_cast<uint64_t>(seq_lens[id]) : std::bit_cast<uint64_t>(work(id))), id);
  sort_by_key(order);
  std::vector<SequenceId> ids;
  for (const KeyedId& keyed : order) ids.push_back(keyed.second);
  return ids;
}

}  // namespace knapformer
