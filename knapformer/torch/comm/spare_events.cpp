#include "knapformer/torch/comm/spare_events.h"

#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace knapformer {
namespace {

struct SpareEvents {
  std::mutex mutex;
  std::unordered_map<c10::Device, std::vector<std::unique_ptr<c10::Event>>> of_device;
};

SpareEvents& spare_events() {
  static auto* const instance = new SpareEvents;
  return *instance;
}

}  // namespace

std::shared_ptr<c10::Event> take_event(c10::Device device) {
  SpareEvents& spares = spare_events();
  std::unique_ptr<c10::Event> event;
  {
    const std::lock_guard lock(spares.mutex);
    auto& here = spares.of_device[device];
    if (!here.empty()) {
      event = std::move(here.back());
      here.pop_back();
    }
  }
  if (!event) event = std::make_unique<c10::Event>(device.type());
  return {event.release(), [device](c10::Event* used) {
            const std::lock_guard lock(spare_events().mutex);
            spare_events().of_device[device].emplace_back(used);
          }};
}

}  // namespace knapformer
