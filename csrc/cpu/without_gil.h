// A stretch of code that waits for peers. A peer may depend on another thread of this very process, so the GIL is let
// go; and Ctrl-C must end the wait.
#pragma once

#include <Python.h>
#include <pybind11/pybind11.h>

#include <optional>

namespace symm_overlap::cpu {

class __attribute__((visibility("hidden"))) WithoutGil {
 public:
  // Callers of C++ may have the GIL or not; both are fine.
  WithoutGil() {
    if (Py_IsInitialized() && PyGILState_Check()) {
      released_.emplace();
    }
  }

  // Runs Python's signal handlers, and throws what they raise. Python runs them in the main thread only.
  void check_signals() const {
    if (released_) {
      const pybind11::gil_scoped_acquire acquired;
      if (PyErr_CheckSignals() != 0) {
        throw pybind11::error_already_set();
      }
    }
  }

 private:
  std::optional<pybind11::gil_scoped_release> released_;
};

}  // namespace symm_overlap::cpu
