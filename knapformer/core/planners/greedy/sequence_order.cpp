#include "knapformer/core/planners/greedy/sequence_order.h"

#include <bit>

#include "knapformer/core/util/sort.h"

namespace knapformer {

std::vector<SequenceId> by_descending_work(const PlanInput& input, int32_t replica) {
  const auto [first, last] = input.sequences_of(replica);
  // Of full attention the longer sequence has more work, and lengths have fewer digits. The bits of a double >= 0 order
  // as it does. Inverted, the most work comes first.
  const bool is_full = input.attention_pairs.empty();
  std::vector<KeyedIndex> order;
  order.reserve(last.index() - first.index());
  for (int32_t s = first.value; s < last.value; ++s) {
    const SequenceId id(s);
    order.push_back(
        {.key = ~(is_full ? static_cast<uint64_t>(input.seq_lens[id]) : std::bit_cast<uint64_t>(input.work(id))),
         .index = s});
  }
  sort_by_key(order);
  std::vector<SequenceId> ids;
  ids.reserve(order.size());
  for (const KeyedIndex& ranked : order) ids.push_back(SequenceId(ranked.index));
  return ids;
}

}  // namespace knapformer
