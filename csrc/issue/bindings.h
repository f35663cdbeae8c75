// The Python bindings of csrc/issue: _C.Program, _C.Operand, _C.Driver and _C.LogDriver.
#pragma once

#include <pybind11/pybind11.h>

namespace symm_overlap::issue {

void register_issue(pybind11::module_& module);

}  // namespace symm_overlap::issue
