// What a rank says of the call that it is about to make, for agreement.h.
#pragma once

#include <string>
#include <string_view>

namespace knapformer {

/// "route(x,ids)" -> "route", "route(x) backward" -> "route backward".
inline std::string call_name(std::string_view label) {
  const size_t open = label.find('('), close = label.rfind(')');
  if (open == std::string_view::npos || close == std::string_view::npos) return std::string(label);
  return std::string(label.substr(0, open)).append(label.substr(close + 1));
}

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
