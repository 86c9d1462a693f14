#include "knapformer/core/model/trained_model.h"

#include <algorithm>
#include <array>

namespace knapformer {

constexpr std::array<std::string_view, 3> kModeNames = {"training", "lora", "inference"};  // by StepMode

Passes TrainedModel::passes() const {
  if (mode == StepMode::kInference) return {.routes = routed ? 2.0 : 0.0};
  // A gradient with respect to the input costs a forward pass, one with respect to the parameters another.
  return {.forwards = recomputes ? 2.0 : 1.0,
          .token_backward = mode == StepMode::kLora ? 1.0 : 2.0,
          .attention_backward = 2,
          .backwards = 1,
          .routes = routed ? 4.0 : 0.0};
}

void TrainedModel::validate() const {
  check_fields(*this);
  if (num_kv_heads > 0 && (num_heads == 0 || num_heads % num_kv_heads != 0))
    throw_argument("num_kv_heads", num_kv_heads, text("a divisor of num_heads, ", num_heads));
}

StepMode parse_step_mode(std::string_view name) {
  const auto found = std::ranges::find(kModeNames, name);
  if (found != kModeNames.end()) return static_cast<StepMode>(found - kModeNames.begin());
  throw_argument("mode", text("'", name, "'"), "'training', 'lora' or 'inference'");
}

std::string_view step_mode_name(StepMode mode) { return kModeNames[static_cast<size_t>(mode)]; }

}  // namespace knapformer
