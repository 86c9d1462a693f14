// The parts of knapformer._torch. Conversion only.
//
// All its files include this one: what pybind11 converts must be the same in all of them.
#pragma once

#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "knapformer/torch/balancer.h"

using BalancerClass = pybind11::class_<knapformer::SequenceBalancer>;

void bind_planning_ahead(pybind11::module_& m);
void bind_planning(BalancerClass& balancer);  // lengths in, a plan out; what a step took, and its metrics
void bind_masks(pybind11::module_& m);        // what packed queries see
void bind_step(pybind11::module_& m);         // routing and attention
