#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

#include "knapformer/torch/kernels/numbers.h"

namespace knapformer::kernels {

/// The item type by which kernels compute with this dtype (for complex numbers, with each half of one); none: they do
/// not.
inline std::optional<Item> item_of(at::ScalarType type) {
  switch (c10::isComplexType(type) ? c10::toRealValueType(type) : type) {
    case at::kFloat:
      return Item::kFloat;
    case at::kDouble:
      return Item::kDouble;
    case at::kHalf:
      return Item::kHalf;
    case at::kBFloat16:
      return Item::kBFloat16;
    default:
      return std::nullopt;
  }
}

}  // namespace knapformer::kernels
