// Tokens that carry their sequence and place: what a rank must hold follows from the plan's chunks alone.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <vector>

namespace knapformer::testing {

struct Token {
  int64_t sequence = 0;
  int64_t position = 0;

  int64_t number() const { return sequence * 1000 + position; }
};

/// (tokens, columns) of numbers that no other token or column has.
inline at::Tensor numbered(const std::vector<Token>& tokens, int64_t columns, double scale) {
  at::Tensor values = at::empty({static_cast<int64_t>(tokens.size()), columns}, at::kDouble);
  double* out = values.mutable_data_ptr<double>();
  for (const Token& token : tokens) {
    for (int64_t c = 0; c < columns; ++c) *out++ = scale * static_cast<double>(token.number() * 100 + c);
  }
  return values;
}

}  // namespace knapformer::testing
