// Given work. Where a sample's work does not follow from its length (two coupled streams, a measured model), W_i FLOPs
// are given for each sequence in place of w(l_i), the formula of core/model/workload.h. W_i is split into the same two
// terms, so that all code that prices or places sequences by the formula handles given work too:
//
//   per-token layers   p 24 l_i d^2          p = min(1, min_i W_i / (24 l_i d^2)), the same for all sequences of a step
//   as attention       W_i - p 24 l_i d^2    shared by the heads, >= 0
//
// All sequences have one p, since chunks are cut by the cost of a token, whichever sequence it belongs to. If the given
// work equals the formula's, then p = 1 and the terms are the formula's, bit for bit. The forward work of a sequence is
// W_i, whatever gamma is.
#include <algorithm>

#include "knapformer/core/plan/plan_input.h"
#include "knapformer/core/util/error.h"

namespace knapformer {

void PlanInput::give_work(std::vector<double> work) {
  token_part = max_token_part(work);
  given_work = std::move(work);
}

double PlanInput::max_token_part(std::span<const double> work) const {
  const int32_t num_sequences = seq_lens.num_sequences();
  if (std::ssize(work) != num_sequences)
    throw_argument("work", text(work.size(), " numbers"), text("one for each of the ", num_sequences, " sequences"));
  // The attention part is counted in (query, key) pairs of gamma * 4 d FLOPs each. With a smaller gamma their number
  // would leave the range of a double.
  constexpr double kMinGamma = 1e-6;
  if (workload.gamma < kMinGamma)
    throw_argument("gamma", workload.gamma, text("at least ", kMinGamma, " where work is given"));
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
  if (token_part == 1 && whole == formula_work(id)) return mask_pairs_of(id);  // the difference would round
  return std::max(0.0, whole - token_work(seq_lens[id])) / workload.attention_work_of_pairs(1, d_model);
}

}  // namespace knapformer
