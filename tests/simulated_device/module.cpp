// The simulated device as a Python module: its counters, its collectives, and the switch that holds collectives back.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "collectives.h"
#include "counters.h"

namespace py = pybind11;

namespace simulated_device {}

PYBIND11_MODULE(_simulated_device, module) {
  using namespace simulated_device;
  module.def("reset_counters", [] { Counters::instance().reset(); });
  module.def("counters", [] {
    Counters& c = Counters::instance();
    py::dict counted;
    counted["launches"] = c.launches.load();
    counted["copies_to_device"] = c.copies_to_device.load();
    counted["packed_bytes"] = c.packed_bytes.load();
    counted["collectives"] = c.collectives.load();
    counted["syncs"] = c.syncs();
    counted["pageable_copies"] = c.pageable_copies();
    counted["launched"] = c.launched();
    return counted;
  });
  module.def("fail_to_pack", [](bool fails) { Counters::instance().fails_to_pack = fails; });
  module.def("make_backend", [](c10::intrusive_ptr<c10d::Backend> hosts) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<LateCollectives>(std::move(hosts));
  });
  module.def("hold_collectives", &hold_collectives, py::arg("held"),
             "Those launched from now on begin when they are let go.");
}
