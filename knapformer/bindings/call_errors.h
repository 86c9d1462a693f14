// What Python's callers read where a call does not fit: one line, as of a function of Python's own.
//
// pybind11 answers with the signatures of all overloads and what came. This rewrites its answer: TypeError for an
// argument that is missing, unexpected or there twice, ArgumentError for one of another type.
#pragma once

#include <pybind11/pybind11.h>

namespace knapformer {

/// For every function, constructor, method and property that the module has. To be called once all are defined.
void make_call_errors_readable(const pybind11::module_& m);

}  // namespace knapformer
