// Engines: how rows get into the buffer of an all-to-all, and out of it.
//
// Three of them, behind one small interface. All make the same bytes, so ranks may mix them.
#pragma once

#include <memory>

#include "knapformer/torch/exchange/call.h"

namespace knapformer {

/// Serves one exchange, whose buffer is there: pack into it, then move_own while the bytes travel, then unpack when
/// they are there.
class Engine {
 public:
  virtual ~Engine() = default;

  virtual void pack() = 0;
  virtual void move_own() = 0;
  /// Allocates the call's outputs, where move_own has not, and fills them.
  virtual void unpack() = 0;
};

/// By memcpy of runs of rows, straight from the tables; CPU tensors. No index tensors and no temporaries; this rank's
/// own rows go from input to output in one copy.
std::unique_ptr<Engine> make_cpu_engine(ExchangeCall& call);

/// By ATen's index operations, for any device: few launches, however many sequences there are and, at whole ends,
/// however many peers.
std::unique_ptr<Engine> make_device_engine(ExchangeCall& call);

/// By the packing kernel: one launch to pack, one to unpack. Own rows go from input to output in one copy.
std::unique_ptr<Engine> make_kernel_engine(ExchangeCall& call);
/// Whether it adds all types whose sums the call needs.
bool packing_kernel_adds(const ExchangeCall& call);

/// The one that the call's tables are for. Sums of a type that the kernel does not add are the device engine's.
std::unique_ptr<Engine> make_engine(ExchangeCall& call);

}  // namespace knapformer
