// A lower bound on the predicted block time of every plan of an input.
//
// Let a plan take time T. A sequence shared by g ranks that take at most T each fits them only if its per-token work,
// its exchange and its attention do: w(l) + x_g(l) <= T * (speed of the g ranks). So there is a smallest degree with
// which it can be shared at all, and since the exchange grows with the degree, with it the sequence costs its bag the
// least rank time. Summed over all sequences that rank time is at most T * (speed of all ranks). The bound is the
// smallest T for which both hold; docs/solver.md derives it in full.
#pragma once

#include "knapformer/core/plan.h"

namespace knapformer {

/// In seconds; 0 without sequences. The largest bound of the replicas. O(n log n).
double lower_bound_s_of(const PlanInput& input);
/// Of one replica, with a topology over the same ranks as the input's.
double replica_lower_bound_s(const PlanInput& input, const Topology& topology, int32_t replica);

}  // namespace knapformer
