// What a rank says of the call that it is about to make, for agreement.h.
#pragma once

#include <string>
#include <string_view>

namespace knapformer {

/// What a rank is about to do: lines "name\tvalue\n" that all ranks must share. First the call, then "heads" where
/// there are, then one line a tensor.
class Statement {
 public:
  explicit Statement(std::string_view call) { add("call", call); }

  void add(std::string_view name, std::string_view value) {
    fields.append(name).append("\t").append(value).append("\n");
  }

  std::string fields;
  /// A '0' or '1' for each tensor: whether its gradient travels back.
  std::string gradients;
  /// A rank without rows has no say in `gradients`: it follows the others.
  bool follows = false;
};

}  // namespace knapformer
