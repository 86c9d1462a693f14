// Errors of calls from Python that do not fit: one line, like that of a function written in Python.
//
// pybind11 answers with the signatures of all overloads and what came. This rewrites its answer: TypeError for an
// argument that is missing, unexpected or there twice, ArgumentError for an argument of another type.
#pragma once

#include <pybind11/pybind11.h>

namespace knapformer {

/// Acts on every function, constructor, method and property that the module has. To be called once all are defined.
void make_call_errors_readable(const pybind11::module_& m);

}  // namespace knapformer
