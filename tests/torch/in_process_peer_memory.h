// Torch's symmetric memory for CPU tensors of the ranks of an InProcessWorld, which have one address space.
#pragma once

#include <cstdint>

namespace knapformer::testing {

/// For CPU tensors of this process from now on. Once is enough.
void provide_peer_memory();

/// Over all ranks and groups, since the process began.
int64_t num_peer_barriers();

}  // namespace knapformer::testing
