// What calls that are refused say.
#pragma once

#include <string>

#include "knapformer/core/util/error.h"

namespace knapformer {

/// The words of the error that a call throws; "" where it throws none.
template <class Thrown = ArgumentError>
std::string refusal_of(const auto& call) {
  try {
    call();
  } catch (const Thrown& error) {
    return error.what();
  }
  return "";
}

}  // namespace knapformer
