// The workload model: FLOPs of one transformer block, and the correction gamma of its attention term.
//
//   w(l) = 24 l d^2 + gamma * 4 a d          [FLOPs, forward; matrix-product equivalents where gamma != 1]
//
// l tokens, width d, a the number of (query, key) pairs that attention computes: l^2 for full attention. This is
// Eq. 1 and 2 of the KnapFormer paper. A sequence that g ranks share costs the rank that holds n of its l tokens
//
//   w(n of l, g) = 24 n d^2 + gamma * 4 a d / g
//
// since per-token work follows the chunk, and attention work follows the heads.
//
// Work that is given for a sequence is split into the same two terms (core/plan/given_work.cpp).
#pragma once

#include <cstdint>

#include "knapformer/core/model/mask.h"
#include "knapformer/core/util/record.h"

namespace knapformer {

/// The cost of a FLOP of attention over that of a FLOP of the matrix products. This value reproduces the published
/// imbalance of a FLUX block on H100, whose authors report 0.385 to 0.49. The default everywhere; `knapformer
/// calibrate` measures it.
inline constexpr double kDefaultGamma = 0.41;

struct WorkloadModel {
  double gamma = kDefaultGamma;

  /// Throws ArgumentError unless gamma is from 0 to kMaxMagnitude.
  void validate() const { check_fields(*this); }

  /// 24 n d^2, in FLOPs.
  double token_work(int64_t num_tokens, int64_t d_model) const {
    return 24.0 * static_cast<double>(num_tokens) * (static_cast<double>(d_model) * static_cast<double>(d_model));
  }
  /// gamma * 4 a d of a whole sequence whose mask leaves `pairs` (query, key) pairs, in FLOPs.
  double attention_work_of_pairs(double pairs, int64_t d_model) const {
    return gamma * 4.0 * pairs * static_cast<double>(d_model);
  }
  /// The work of a whole sequence, in FLOPs.
  double work(int64_t seq_len, int64_t d_model, const Mask& mask = {}) const {
    return token_work(seq_len, d_model) + attention_work_of_pairs(static_cast<double>(mask.pairs(seq_len)), d_model);
  }

  bool operator==(const WorkloadModel&) const = default;

  static constexpr auto fields() {
    return std::tuple{field("gamma", &WorkloadModel::gamma,
                            "The cost of a FLOP of attention over that of a FLOP of the matrix products.")};
  }
};
static_assert(kListsEveryField<WorkloadModel>);

}  // namespace knapformer
