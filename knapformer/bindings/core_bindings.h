// The parts of knapformer._core, in the order in which they need each other. Conversion only.
#pragma once

#include <pybind11/pybind11.h>

void bind_model(pybind11::module_& m);            // FLOPs, masks, the fit; bags of ranks; seeded lengths
void bind_cost_parameters(pybind11::module_& m);  // clusters and models
void bind_plan(pybind11::module_& m);             // Plan
void bind_planner(pybind11::module_& m);          // the planners, and topologies
void bind_cost(pybind11::module_& m);             // the predicted step time
