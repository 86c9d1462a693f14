// What no plan of an input can be below.
//
// Let a plan take block time T. A sequence shared by g ranks that take at most T each fits them only if its per-token
// work, its exchange and its attention do: w(l) + x_g(l) <= T * (speed of the g ranks). So there is a smallest degree
// with which it can be shared at all, and since the exchange grows with the degree, with it the sequence costs its bag
// the least rank time. Summed over all sequences that rank time is at most T * (speed of all ranks). The bound is the
// smallest T for which both hold; docs/solver.md derives it in full.
//
// Of the exchange only what no plan can hide counts, by the link on which it takes longer over all sequences.
#pragma once

#include <span>

#include "knapformer/core/plan/plan.h"
#include "knapformer/core/plan/plan_json.h"

namespace knapformer {

/// Seconds of a step, like predict_step's total; the fixed time alone without sequences. O(n log n).
double lower_bound_s(const PlanInput& input);
/// The plan's predicted step beside it.
PlanPrediction prediction_of(const Plan& plan);

/// Of one replica's blocks (ReplicaTime::block_s), with a topology over the same ranks as the input's.
double replica_lower_bound_s(const PlanInput& input, const Topology& topology, int32_t replica);
/// The same as if attention hid nothing: no bound, but closer to what plans reach.
double replica_estimate_s(const PlanInput& input, int32_t replica);

/// Whether a replica's flat bags may have a plan whose block takes less than `block_s`: false is proven. Beyond the
/// bound above it sees that bags of one size cannot take over what fits only others, and which sequences share no bag.
/// `topology`: over the same ranks as the input's. O(n shapes + n log n).
bool flat_may_take_less(const PlanInput& input, const Topology& topology, int32_t replica, double block_s);
/// Of a replica's blocks with these sequences in its flat bags, however their chunks are cut.
double flat_lower_bound_s(const PlanInput& input, const Topology& topology, int32_t replica,
                          std::span<const Placement> placements);

}  // namespace knapformer
