#include "knapformer/core/plan/plan.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "knapformer/core/util/error.h"
#include "knapformer/core/util/sort.h"

namespace knapformer {
namespace {

// The attention part of a given work is counted in (query, key) pairs of gamma * 4 d FLOPs each. With a smaller gamma
// the number of pairs would leave the range of a double.
constexpr double kMinGammaOfGivenWork = 1e-6;

}  // namespace

void PlanInput::give_work(std::vector<double> work) {
  token_part = max_token_part(work);
  given_work = std::move(work);
}

double PlanInput::max_token_part(std::span<const double> work) const {
  if (work.size() != static_cast<size_t>(seq_lens.num_sequences())) {
    throw_argument("work", text(work.size(), " numbers"),
                   text("one for each of the ", seq_lens.num_sequences(), " sequences"));
  }
  if (workload.gamma < kMinGammaOfGivenWork)
    throw_argument("gamma", workload.gamma, text("at least ", kMinGammaOfGivenWork, " where work is given"));
  double part = 1;
  for (size_t s = 0; s < work.size(); ++s) {
    if (!(work[s] >= 1 / kMaxMagnitude && work[s] <= kMaxMagnitude)) {
      throw_argument("work", text(work[s], " for sequence ", s),
                     text("a positive finite number, from ", 1 / kMaxMagnitude, " to ", kMaxMagnitude));
    }
    part = std::min(part, work[s] / workload.token_work(seq_lens[SequenceId(s)], d_model));
  }
  return part;
}

double PlanInput::given_pairs_of(SequenceId id) const {
  const double whole = given_work[id.index()];
  // The difference below would round.
  if (token_part == 1 && whole == formula_work(id)) return mask_pairs_of(id);
  return std::max(0.0, whole - token_work(seq_lens[id])) / workload.attention_work_of_pairs(1, d_model);
}

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
  if (!attention_pairs.empty() && attention_pairs.size() != static_cast<size_t>(seq_lens.num_sequences())) {
    throw_argument("attention_pairs", text(attention_pairs.size(), " counts"),
                   text("none, or one for each of the ", seq_lens.num_sequences(), " sequences"));
  }
  if (!masks.empty() && masks.size() != attention_pairs.size()) {
    throw_argument("masks", text(masks.size(), " masks"),
                   text("one for each of the ", attention_pairs.size(), " counts of pairs"));
  }
  for (size_t s = 0; s < attention_pairs.size(); ++s) {
    const int64_t length = seq_lens[SequenceId(s)];
    if (attention_pairs[s] < 0 || attention_pairs[s] > length * length) {
      throw_argument("attention_pairs", text(attention_pairs[s], " for sequence ", s),
                     text("0 to ", length, "^2 pairs"));
    }
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
  if (!given_work.empty()) {
    // token_part is lower than this input allows if another micro-batch of the step allows no more.
    check_range("token_part", token_part, 0, max_token_part(given_work));
  } else {
    check_range("token_part", token_part, 0, 1);
  }
  for (const QueryCut& cut : query_cuts) {
    if (cut.degree < 1 || cut.num_parts < 1 || cut.degree % cut.num_parts != 0) {
      throw_argument("query_cuts", text(cut.num_parts, " parts for ", cut.degree, " ranks"), "a divisor of the ranks");
    }
    const bool may_stage = cut.num_parts > 1 && masks.empty();
    if (cut.num_stages < 1 || cut.num_stages > (may_stage ? QueryCut::kMaxStages : 1)) {
      throw_argument("query_cuts", text(cut.num_stages, " stages of ", cut.num_parts, " parts"),
                     text("1, or up to ", QueryCut::kMaxStages, " where queries are cut of full attention"));
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

std::optional<Mask> PlanInput::mask_of(SequenceId id) const {
  if (!masks.empty()) return masks[id.index()];
  return attention_pairs.empty() ? std::optional(Mask()) : std::nullopt;
}

std::optional<Mask> PlanInput::common_mask() const {
  if (masks.empty()) return mask_of(SequenceId(0));
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
  // With full attention a longer sequence has more work, so the key is the length, which has fewer digits to sort by.
  // The bits of a double >= 0 sort as its value does. Keys are inverted, so that the most work comes first.
  const bool is_full = attention_pairs.empty() && given_work.empty();
  std::vector<KeyedIndex> order;
  order.reserve(last.index() - first.index());
  for (int32_t s = first.value; s < last.value; ++s) {
    const SequenceId id(s);
    order.push_back(
        {.key = ~(is_full ? static_cast<uint64_t>(seq_lens[id]) : std::bit_cast<uint64_t>(work(id))), .index = s});
  }
  sort_by_key(order);
  std::vector<SequenceId> ids;
  ids.reserve(order.size());
  for (const KeyedIndex& ranked : order) ids.push_back(SequenceId(ranked.index));
  return ids;
}

Plan::Plan(PlanInput input, std::string solver, std::vector<Placement> placements)
    : input_(std::move(input)), solver_(std::move(solver)), placements_(std::move(placements)) {
  size_t num_chunks = 0;
  for (const Placement& p : placements_) num_chunks += static_cast<size_t>(p.degree);
  std::vector<int64_t> chunk_lens(num_chunks);
  // By bag: the next rank to hold one token more, as a running count from the bag's first rank. A group begins at a
  // multiple of its degree, so within the group the rotation goes on where the last sequence left it.
  std::vector<int64_t> next_extra(topology().bags().size(), 0);
  size_t next = 0;
  for (size_t s = 0; s < placements_.size(); ++s) {
    const int64_t degree = placements_[s].degree;
    const int64_t length = seq_lens()[SequenceId(s)];
    const int64_t share = length / degree, extra = length % degree;
    int64_t& start = next_extra[placements_[s].bag.index()];
    for (int64_t i = 0; i < degree; ++i) {
      const int64_t turn = (i + degree - start % degree) % degree;
      chunk_lens[next++] = share + (turn < extra ? 1 : 0);
    }
    start += extra;
  }
  lay_out(chunk_lens);
}

Plan::Plan(PlanInput input, std::string solver, std::vector<Placement> placements, std::vector<int64_t> chunk_lens)
    : input_(std::move(input)), solver_(std::move(solver)), placements_(std::move(placements)) {
  lay_out(chunk_lens);
}

void Plan::lay_out(std::span<const int64_t> chunk_lens) {
  const auto num_ranks = static_cast<size_t>(this->num_ranks());
  KNAPFORMER_ASSERT(placements_.size() == static_cast<size_t>(num_sequences()));
  chunks_.values.resize(chunk_lens.size());
  chunks_.offsets.reserve(placements_.size() + 1);
  workload_before_.assign(num_ranks, 0.0);
  workload_after_.assign(num_ranks, 0.0);
  tokens_before_.assign(num_ranks, 0);
  tokens_after_.assign(num_ranks, 0);

  // Sums of whole numbers, so that work does not depend on the order of sequences.
  std::vector<double> pairs_before(num_ranks), pairs_after(num_ranks);
  const AttentionShares shares = input_.attention_shares();
  const auto work_of = [&](int64_t tokens, double pairs) {
    return input_.token_work(tokens) + input_.workload.attention_work_of_pairs(pairs, input_.d_model);
  };
  size_t next = 0;
  for (size_t s = 0; s < placements_.size(); ++s) {
    const SequenceId id(s);
    const Placement& place = placements_[s];
    const Rank home = seq_lens().home_of(id);
    const int64_t length = seq_lens()[id];
    const double pairs = input_.pairs_of(id);
    pairs_before[home.index()] += pairs;
    tokens_before_[home.index()] += length;
    num_tokens_ += length;
    int64_t first_token = 0;
    for (int32_t i = 0; i < place.degree; ++i) {
      const Rank rank(place.first_rank.value + i);
      const int64_t tokens = chunk_lens[next];
      chunks_.values[next++] = {.sequence = id, .rank = rank, .first_token = first_token, .num_tokens = tokens};
      first_token += tokens;
      pairs_after[rank.index()] += shares.part(pairs, place.degree, i);
      tokens_after_[rank.index()] += tokens;
      if (rank != home) tokens_moved_ += tokens;
    }
    attention_tokens_moved_ += static_cast<double>(length) * (place.degree - 1) / place.degree;
    chunks_.offsets.push_back(static_cast<int32_t>(next));
  }
  KNAPFORMER_ASSERT(next == chunk_lens.size());
  for (size_t r = 0; r < num_ranks; ++r) {
    workload_before_[r] = work_of(tokens_before_[r], pairs_before[r]);
    workload_after_[r] = work_of(tokens_after_[r], pairs_after[r]);
  }

  // Chunks that are grouped by rank keep sequence order; within a rank of a nested bag, a stable sort by degree
  // follows.
  rank_chunks_ = grouped(this->num_ranks(), chunks_.offsets.back(), [&](int32_t c) { return chunk(c).rank.value; });
  if (!topology().is_flat()) {
    const auto by_degree = [&](int32_t a, int32_t b) { return degree_of(chunk(a)) < degree_of(chunk(b)); };
    const auto begin = rank_chunks_.values.begin();
    for (size_t r = 0; r < num_ranks; ++r)
      std::stable_sort(begin + rank_chunks_.offsets[r], begin + rank_chunks_.offsets[r + 1], by_degree);
  }
}

std::vector<QueryPart> Plan::query_parts(SequenceId id) const {
  return input_.mask_of(id).value_or(Mask()).query_parts(seq_lens()[id], input_.num_query_parts(placement(id).degree));
}

std::vector<int64_t> Plan::chunk_lens() const {
  std::vector<int64_t> lens;
  lens.reserve(chunks().size());
  for (const Chunk& chunk : chunks()) lens.push_back(chunk.num_tokens);
  return lens;
}

void Plan::validate() const {
  const auto check = [](bool is_right, const auto&... found) {
    if (!is_right) throw StateError(text("plan: ", found...));
  };
  input_.validate();
  check(std::ssize(placements_) == num_sequences(), placements_.size(), " placements for ", num_sequences(),
        " sequences");
  const std::string shape_text = topology().str();
  std::vector<int64_t> tokens(static_cast<size_t>(num_ranks()), 0);
  for (int32_t s = 0; s < num_sequences(); ++s) {
    const SequenceId id(s);
    const Placement& place = placement(id);
    check(place.bag.value >= 0 && place.bag.index() < topology().bags().size(), "sequence ", s, " is in bag ",
          place.bag.value, ", expected one of ", topology().bags().size());
    const Bag& bag = topology().bag(place.bag);
    const auto& degrees = topology().shapes()[bag.shape].degrees;
    const int32_t offset = place.first_rank.value - bag.first_rank.value;
    check(std::ranges::binary_search(degrees, place.degree) && offset >= 0 && offset + place.degree <= bag.num_ranks &&
              offset % place.degree == 0,
          "sequence ", s, " is shared by ", place.degree, " ranks from rank ", place.first_rank.value,
          ", expected an aligned group of bag ", place.bag.value, " of topology ", shape_text);
    const int32_t replica = place.bag.value / topology().num_bags_per_replica();
    check(seq_lens().home_of(id).value / topology().num_ranks_per_replica() == replica, "sequence ", s,
          " leaves its replica");
    int64_t next_token = 0;
    int32_t next_rank = place.first_rank.value;
    for (const Chunk& chunk : chunks(id)) {
      check(chunk.sequence == id && chunk.rank.value == next_rank++ && chunk.first_token == next_token &&
                chunk.num_tokens >= 0,
            "the chunks of sequence ", s, " do not follow each other over the ranks of its group");
      next_token += chunk.num_tokens;
      tokens[chunk.rank.index()] += chunk.num_tokens;
    }
    check(next_token == seq_lens()[id] && next_rank == place.first_rank.value + place.degree, "the chunks of sequence ",
          s, " hold ", next_token, " tokens, expected ", seq_lens()[id]);
  }
  size_t num_held = 0;
  for (int32_t r = 0; r < num_ranks(); ++r) {
    int64_t held = 0;
    const Chunk* last = nullptr;
    for (const int32_t index : chunks_on(Rank(r))) {
      const Chunk& c = chunk(index);
      const bool in_order = last == nullptr || degree_of(*last) < degree_of(c) ||
                            (degree_of(*last) == degree_of(c) && last->sequence < c.sequence);
      check(c.rank == Rank(r) && in_order, "the chunks of rank ", r, " are out of order");
      held += c.num_tokens;
      last = &c;
      ++num_held;
    }
    check(held == tokens[r] && held == tokens_after_[r], "rank ", r, " lists ", held, " tokens, expected ", tokens[r]);
  }
  check(num_held == chunks().size(), num_held, " of ", chunks().size(), " chunks are on a rank");
}

Plan plan_home(const PlanInput& input) {
  PlanInput alone = input;
  alone.topology = Topology::parse(text("g1n", input.seq_lens.num_ranks()));
  return plan_home_bags(alone);
}

Plan plan_home_bags(const PlanInput& input) {
  const Topology& topology = input.topology;
  if (!topology.is_flat()) throw_argument("topology", topology.str(), "flat bags, such as g8n4");
  std::vector<Placement> placements;
  placements.reserve(input.seq_lens.lens().size());
  for (int32_t s = 0; s < input.seq_lens.num_sequences(); ++s) {
    const BagId home = topology.bag_of(input.seq_lens.home_of(SequenceId(s)));
    const auto& bag = topology.bag(home);
    placements.push_back({.bag = home, .first_rank = bag.first_rank, .degree = bag.num_ranks});
  }
  return Plan(input, "home", std::move(placements));
}

}  // namespace knapformer
