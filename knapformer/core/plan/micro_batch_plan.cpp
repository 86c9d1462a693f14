#include "knapformer/core/plan/micro_batch_plan.h"

#include <algorithm>

#include "knapformer/core/util/error.h"

namespace knapformer {

MicroBatchPlan::MicroBatchPlan(PlanInput input, std::string solver, std::vector<Placement> placements)
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

MicroBatchPlan::MicroBatchPlan(PlanInput input, std::string solver, std::vector<Placement> placements,
                               std::vector<int64_t> chunk_lens)
    : input_(std::move(input)), solver_(std::move(solver)), placements_(std::move(placements)) {
  lay_out(chunk_lens);
}

void MicroBatchPlan::lay_out(std::span<const int64_t> chunk_lens) {
  const auto num_ranks = static_cast<size_t>(this->num_ranks());
  KNAPFORMER_ASSERT(placements_.size() == static_cast<size_t>(num_sequences()));
  chunks_.values.resize(chunk_lens.size());
  chunks_.offsets.reserve(placements_.size() + 1);
  workload_before_.assign(num_ranks, 0.0);
  workload_after_.assign(num_ranks, 0.0);
  pairs_after_.assign(num_ranks, 0.0);
  tokens_before_.assign(num_ranks, 0);
  tokens_after_.assign(num_ranks, 0);

  // Sums of whole numbers, so that work does not depend on the order of sequences.
  std::vector<double> pairs_before(num_ranks);
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
      pairs_after_[rank.index()] += shares.part(pairs, place.degree, i);
      tokens_after_[rank.index()] += tokens;
      if (rank != home) tokens_moved_ += tokens;
    }
    attention_tokens_moved_ += static_cast<double>(length) * (place.degree - 1) / place.degree;
    chunks_.offsets.push_back(static_cast<int32_t>(next));
  }
  KNAPFORMER_ASSERT(next == chunk_lens.size());
  for (size_t r = 0; r < num_ranks; ++r) {
    workload_before_[r] = work_of(tokens_before_[r], pairs_before[r]);
    workload_after_[r] = work_of(tokens_after_[r], pairs_after_[r]);
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

std::vector<QueryPart> MicroBatchPlan::query_parts(SequenceId id) const {
  return input_.mask_of(id).query_parts(seq_lens()[id], input_.attention_cut(placement(id).degree).num_parts);
}

std::vector<int64_t> MicroBatchPlan::chunk_lens() const {
  std::vector<int64_t> lens;
  lens.reserve(chunks().size());
  for (const Chunk& chunk : chunks()) lens.push_back(chunk.num_tokens);
  return lens;
}

void MicroBatchPlan::validate() const {
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

MicroBatchPlan plan_home(const PlanInput& input) {
  PlanInput alone = input;
  alone.topology = Topology::parse(text("g1n", input.seq_lens.num_ranks()));
  return plan_home_bags(alone);
}

MicroBatchPlan plan_home_bags(const PlanInput& input) {
  const Topology& topology = input.topology;
  if (!topology.is_flat()) throw_argument("topology", topology.str(), "flat bags, such as g8n4");
  std::vector<Placement> placements;
  placements.reserve(input.seq_lens.lens().size());
  for (int32_t s = 0; s < input.seq_lens.num_sequences(); ++s) {
    const BagId home = topology.bag_of(input.seq_lens.home_of(SequenceId(s)));
    const auto& bag = topology.bag(home);
    placements.push_back({.bag = home, .first_rank = bag.first_rank, .degree = bag.num_ranks});
  }
  return MicroBatchPlan(input, "home", std::move(placements));
}

}  // namespace knapformer
