// Part of knapformer._core: the predicted step time.
#pragma once

#include <pybind11/pybind11.h>

void bind_step_time(pybind11::module_& m);
