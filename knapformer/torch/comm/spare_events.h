// Events that are recorded anew. None is ever destroyed: while a device hangs, that might not return.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <memory>

namespace knapformer {

/// An event of nobody else's; another's once it is released. Thread-safe.
std::shared_ptr<c10::Event> take_event(c10::Device device);

}  // namespace knapformer
