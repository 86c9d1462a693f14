// How rows get into the buffer of an all-to-all, and out of it: lists of copies of rows (copies.h), from tensors into
// the buffer, from the buffer into tensors, and of this rank's own rows from input to output. What adds up is added by
// ATen.
#pragma once

#include "knapformer/torch/exchange/call.h"

namespace knapformer {

/// Before the all-to-all. Where the packing kernel does it, this rank's own rows are copied in the same launch.
void pack(ExchangeCall& call);
/// While the bytes travel.
void move_own(ExchangeCall& call);
/// When they are there: fills the call's outputs.
void unpack(ExchangeCall& call);

}  // namespace knapformer
