// The text forms of written masks (mask.h).
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "knapformer/core/model/mask.h"

namespace knapformer {

/// Nothing where the text is malformed.
std::optional<std::vector<MaskRun>> runs_from(std::string_view text);

}  // namespace knapformer
