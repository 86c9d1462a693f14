// The rotation kernel thread by thread, and rotate() by operations of ATen, over random shapes and strides: against the
// definition in float64.
#include "knapformer/torch/kernels/rotation.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace knapformer {
namespace {

at::Tensor turns_of(int64_t num_tokens, int64_t num_pairs, at::ScalarType type) {
  const at::Tensor angle = at::rand({num_tokens, 1, num_pairs}, at::kDouble) * 100;
  return at::stack({angle.cos(), angle.sin()}, -1).to(type);
}

/// Pair by pair, as RoPE is defined, in float64.
at::Tensor rotated_by_hand(const at::Tensor& x, const at::Tensor& turns, bool back) {
  const at::Tensor given = x.to(at::kDouble), by = turns.to(at::kDouble).squeeze(1).flatten(1);
  at::Tensor out = at::empty_like(given);
  const auto from = given.accessor<double, 3>();
  const auto turn = by.accessor<double, 2>();
  auto to = out.accessor<double, 3>();
  for (int64_t t = 0; t < x.size(0); ++t) {
    for (int64_t h = 0; h < x.size(1); ++h) {
      for (int64_t i = 0; i < x.size(2); i += 2) {
        const double cos = turn[t][i], sin = back ? -turn[t][i + 1] : turn[t][i + 1];
        to[t][h][i] = from[t][h][i] * cos - from[t][h][i + 1] * sin;
        to[t][h][i + 1] = from[t][h][i] * sin + from[t][h][i + 1] * cos;
      }
    }
  }
  return out;
}

TEST(RotationKernel, IsTheRotationOfAnyShapeStridesAndType) {
  std::mt19937 random(7);
  const auto draw = [&](int64_t first, int64_t last) {
    return std::uniform_int_distribution<int64_t>(first, last)(random);
  };
  for (int round = 0; round < 400; ++round) {
    const int64_t tokens = draw(0, 70), heads = draw(0, 9), head_dim = 2 * draw(0, 40);
    const at::ScalarType types[] = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16};
    const at::ScalarType type = types[draw(0, 3)], turns_type = types[draw(0, 1)];
    // Columns of wider rows, as of a projection to q, k and v at once; some at odd places, some transposed.
    const int64_t left = draw(0, 3), right = draw(0, 3);
    const at::Tensor rows = at::randn({tokens, left + heads * head_dim + right}).to(type);
    at::Tensor x = rows.narrow(1, left, heads * head_dim).unflatten(1, {heads, head_dim});
    if (draw(0, 4) == 0) x = at::randn({tokens, head_dim, heads}).to(type).transpose(1, 2);
    const at::Tensor turns = turns_of(tokens, head_dim / 2, turns_type);
    const bool back = draw(0, 1) == 1;

    const at::Tensor out = rotate_by_kernel(x, turns, back);
    EXPECT_EQ(out.scalar_type(), type);
    EXPECT_TRUE(out.is_contiguous());
    const at::Tensor expected = rotated_by_hand(x, turns, back);
    const bool in_double = type == at::kDouble && turns_type == at::kDouble;
    const double eps = type == at::kBFloat16 ? 8e-3 : type == at::kHalf ? 1e-3 : in_double ? 1e-14 : 1e-6;
    EXPECT_TRUE(at::allclose(out.to(at::kDouble), expected, eps, eps)) << round;
    EXPECT_TRUE(at::allclose(rotate(x, turns, back).to(at::kDouble), expected, eps, eps)) << round;
  }
}

TEST(RotationKernel, BackIsItsInverse) {
  const at::Tensor x = at::randn({3, 5, 6}), turns = turns_of(3, 3, at::kFloat);
  const at::Tensor out = rotate_by_kernel(rotate_by_kernel(x, turns, false), turns, true);
  EXPECT_TRUE(at::allclose(out, x, 1e-6, 1e-6));
}

}  // namespace
}  // namespace knapformer
