// What no plan of flat bags can be below: so that the balanced solver plans only those beside a nested plan that may
// win.
#pragma once

#include <span>

#include "knapformer/core/plan.h"

namespace knapformer {

/// Whether a replica's flat bags may have a plan that takes less than `time_s`: false is proven. Beyond the bound of
/// lower_bound.h it sees that bags of one size cannot take over what fits only others, and which sequences share no
/// bag. `topology`: over the same ranks as the input's. O(n shapes + n log n).
bool flat_may_take_less(const PlanInput& input, const Topology& topology, int32_t replica, double time_s);
/// Of a replica with these sequences in its flat bags, however their chunks are cut.
double flat_lower_bound_s(const PlanInput& input, const Topology& topology, int32_t replica,
                          std::span<const Placement> placements);

}  // namespace knapformer
