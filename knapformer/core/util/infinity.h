#pragma once

#include <limits>

namespace knapformer {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

}  // namespace knapformer
