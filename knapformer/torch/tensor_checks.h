// What the balancer's methods check of tensors that they are given. All throw ArgumentError.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>

namespace knapformer {

/// A dense tensor of `num_rows` rows and at least `min_dims` dimensions. `rows` says in messages what it has rows for.
void check_rows(const at::Tensor& tensor, std::string_view argument, int64_t num_rows, std::string_view rows,
                int64_t min_dims);

/// On the device of `as`.
void check_device(const at::Tensor& tensor, std::string_view argument, const at::Tensor& as, std::string_view as_name);

/// Not on the meta device.
void check_has_memory(const at::Tensor& tensor, std::string_view argument);

}  // namespace knapformer
